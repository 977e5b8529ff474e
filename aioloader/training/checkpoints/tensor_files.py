"""The tensors of a checkpoint, in the format of torch.distributed.checkpoint: written and read by one process, without communication."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from aioloader.errors import ConfigError

__all__ = ["read_tensors", "write_tensors"]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` into the directory `path` and flush them to the disk.

    Goes through the parts of torch.distributed.checkpoint and not through its `save`, which warns where there is no process group: a
    warning can only be silenced for all threads of the process, and this runs beside a training step.

    Raises:
        ConfigError: The file system does not take them.
    """
    planner, writer = DefaultSavePlanner(), FileSystemWriter(path)
    planner.set_up_planner(dict(tensors), storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    try:
        results = writer.write_data(planner.finish_plan(plan), planner)
        results.wait()
    except RuntimeError as error:  # of torch's file writer, which says at most what it has not written
        free = f"{shutil.disk_usage(path).free / 2**20:.0f} MiB are free"
        raise ConfigError(
            f"checkpoint in {path}", expected="room for its tensors", got=f"{error} ({free})", do="free space there"
        ) from error
    writer.finish(metadata, [results.value()])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in the directory `path`, on the CPU."""
    reader = FileSystemReader(path)
    found = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for key, metadata in found.items():
        assert isinstance(metadata, TensorStorageMetadata), "only tensors are given to torch.distributed.checkpoint"
        tensors[key] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized", category=UserWarning)
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors
