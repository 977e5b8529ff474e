"""The order of the stages: a dataset is dealt to the ranks first and preprocessed then."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed

from aioloader.order.already_sharded import AlreadySharded

__all__ = ["stages_of", "warn_if_unsharded"]


def stages_of(dataset: Any) -> list[str]:
    """Return the stages that a dataset of ours is made of, the outermost first; "shard" also for one that is split already."""
    stages: list[str] = []
    while True:
        if isinstance(dataset, AlreadySharded):
            return [*stages, "shard"]
        stage = getattr(type(dataset), "aioloader_stage", None)
        if stage is None:
            return stages
        stages.append(stage)
        dataset = dataset.dataset


def warn_if_unsharded(dataset: Any) -> None:
    """Warn where several ranks would each preprocess all of a dataset."""
    num_ranks = _num_ranks()
    if num_ranks > 1 and "shard" not in stages_of(dataset):
        warnings.warn(
            "AsyncPreprocessIterableDataset(dataset): expected a dataset that is dealt to the data-parallel ranks, got one that is not, "
            f"in a job of {num_ranks} ranks, each of which would train on all of it; wrap it in "
            "DistributedIterableDataset(dataset, mesh), or, if it is split already, in AlreadySharded(dataset).",
            UserWarning,
            stacklevel=3,
        )


def _num_ranks() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    world_size = os.environ.get("WORLD_SIZE", "1")
    return int(world_size) if world_size.isdecimal() else 1
