"""Who takes part.

A contestant turns a workload into an iterable of batches, dicts of tensors: the same batches, in the same order but where it says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tests.benchmarks import feeds_aioloader, feeds_grain, feeds_huggingface, feeds_plain, feeds_spdl, feeds_torch
from tests.benchmarks.work import Work

__all__ = ["COLD", "CONTESTANTS", "DATALOADERS", "OURS", "REFERENCES", "Contestant", "Feed"]

Feed = AbstractContextManager[Iterable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One loader in one configuration.

    Attributes:
        name: What the command line calls it.
        open: (work, workers) -> the batches, within a `with` block that ends all it started.
        requires: Modules that must be installed.
        is_ordered: Whether it delivers the batches in the order of the records.
    """

    name: str
    open: Callable[[Work, int], Feed]
    requires: tuple[str, ...] = ("torch",)
    is_ordered: bool = True

    def missing(self) -> list[str]:
        """Return the modules that it lacks here."""
        return [module for module in self.requires if importlib.util.find_spec(module) is None]


_ALL = (
    Contestant(name="aioloader", open=feeds_aioloader.sidecar),
    Contestant(name="aioloader-thread", open=feeds_aioloader.thread),
    Contestant(name="dataloader-map", open=feeds_torch.map_style),
    Contestant(name="dataloader-iterable", open=feeds_torch.iterable),
    Contestant(name="dataloader-spawn", open=feeds_torch.spawned),
    Contestant(name="dataloader-forkserver", open=feeds_torch.forkserver),
    Contestant(name="stateful-dataloader", open=feeds_torch.stateful, requires=("torch", "torchdata")),
    Contestant(name="nodes-process", open=feeds_torch.nodes_process, requires=("torch", "torchdata")),
    Contestant(name="nodes-thread", open=feeds_torch.nodes_thread, requires=("torch", "torchdata")),
    Contestant(name="grain", open=feeds_grain.multiprocess, requires=("torch", "grain")),
    Contestant(name="spdl", open=feeds_spdl.process_pool, requires=("torch", "spdl")),
    Contestant(name="spdl-region", open=feeds_spdl.region, requires=("torch", "spdl"), is_ordered=False),
    Contestant(name="huggingface", open=feeds_huggingface.streamed, requires=("torch", "datasets")),
    Contestant(name="pool", open=feeds_plain.pool),
    Contestant(name="pool-64", open=feeds_plain.pool_64),
    Contestant(name="serial", open=feeds_plain.serial),
    Contestant(name="nothing", open=feeds_plain.nothing),
    Contestant(name="floor", open=feeds_plain.floor),
    Contestant(name="cold", open=feeds_aioloader.sidecar),
    Contestant(name="cold-thread", open=feeds_aioloader.thread),
)

CONTESTANTS = {contestant.name: contestant for contestant in _ALL}

OURS = ("aioloader", "aioloader-thread")
DATALOADERS = ("dataloader-map", "dataloader-iterable", "dataloader-spawn", "dataloader-forkserver")
COLD = ("cold", "cold-thread")
"""Ours, from the beginning where the others resume."""

REFERENCES = ("serial", "nothing", "floor", *COLD)
"""Not peers: what one process does alone, a trainer without any loader, what any hand-over between processes takes, and cold starts."""
