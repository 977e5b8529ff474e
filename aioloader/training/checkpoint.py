"""Saves and loads model, optimizer, scheduler and loader state at an optimizer-step border.

Tensors go through torch.distributed.checkpoint, all else is JSON. A checkpoint appears at once and complete, or not at all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from aioloader.errors import ConfigError, ResumeError, SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.protocols import Json
from aioloader.state import merge
from aioloader.training import checkpoint_files as files
from aioloader.training.checkpoint_files import latest_checkpoint
from aioloader.training.dp_group import DEFAULT_TIMEOUT_S, DataParallelGroup
from aioloader.training.state_tree import join_state, split_state

__all__ = ["Checkpoint", "Stateful", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]


class Stateful(Protocol):
    """What a checkpoint needs of a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What was loaded beside the tensors.

    Attributes:
        path: The checkpoint's own directory.
        step: Optimizer steps that it holds.
        loader_state: What this rank's loader gave when it was saved; where another number of ranks saved, what `aioloader.state.merge`
            made of those of all.
        progress: What the trainer gave when it was saved.
    """

    path: Path
    step: int
    loader_state: Json
    progress: Mapping[str, Json]


def save_checkpoint(
    directory: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Stateful | None = None,
    loader_state: Json = None,
    *,
    progress: Mapping[str, Json] | None = None,
    keep: int | None = 2,
    mesh: Mesh | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Path:
    """Save everything that the next step depends on and return the checkpoint's path; call it on every rank.

    Model and optimizer must be the same on all ranks, as after `GradientSynchronizer.sync_gradients`; those of rank 0 are kept.
    Random-number generators are not saved. Only one run at a time may save into a directory.

    Args:
        directory: Holds one sub-directory for each step; shared by all ranks.
        step: Optimizer steps done.
        model: Saved with its buffers.
        optimizer: Saved with its parameter groups.
        scheduler: Saved where given.
        loader_state: JSON-compatible; each rank saves its own.
        progress: More JSON-compatible data; that of rank 0 is kept.
        keep: How many checkpoints to keep, this one counted; None: all.
        mesh: Where this rank stands; default: from the process group, else from torchrun's environment.
        group: The data-parallel process group; default: all ranks.
        timeout_s: How long to wait for the other ranks.

    Raises:
        ConfigError: `keep` or `step` is out of range, a state cannot be saved without pickle, or the directory is not shared.
        SynchronizationError: Another rank failed or is missing. The checkpoint does not exist then.
    """
    _check_numbers(step, keep)
    dp = DataParallelGroup.resolve(mesh, group, timeout_s)
    directory, where = Path(directory), f"save_checkpoint, step {step}"
    with dp.together(f"{where}, preparing"):
        tensors, tree = _take_apart(model, optimizer, scheduler)
        if dp.rank == 0:
            files.prepare(directory, step)
    with dp.together(f"{where}, writing"):
        partial = files.partial_path(directory, step)
        _write_tensors(partial, tensors, dp, where)
        files.write_json(partial / files.loader_file(dp.rank), loader_state)
        if dp.rank == 0:
            files.write_json(partial / files.TRAINING, {"step": step, "progress": dict(progress or {}), "state": tree})
    with dp.together(f"{where}, publishing"):
        if dp.rank == 0:
            files.publish(directory, step, dp.size)
            if keep is not None:
                files.remove_older(directory, step, keep)
    return files.step_path(directory, step)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Stateful | None = None,
    *,
    mesh: Mesh | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Checkpoint:
    """Load the checkpoint in `path` (see `latest_checkpoint`), every value bit for bit; call it on every rank.

    Everything is compared before anything is changed. The tensors' index is read by torch with pickle: load only checkpoints
    that you trust.

    Raises:
        ConfigError: There is no complete checkpoint in `path`.
        ResumeError: It was saved by another model, optimizer or scheduler, or by another number of data-parallel ranks with loaders
            whose states cannot be merged.
        SynchronizationError: Another rank failed or is missing.
    """
    dp = DataParallelGroup.resolve(mesh, group, timeout_s)
    path = Path(path)
    with dp.together(f"load_checkpoint({str(path)!r})"):
        num_saved = _saved_dp_size(path)
        loader_state = _read_loader_state(path, num_saved, dp)
        training = files.read_json(path / files.TRAINING)
        state = join_state(training["state"], _read_tensors(path))
        _check_same(state, model, optimizer, scheduler)
        _take_over(state, model, optimizer, scheduler)
    return Checkpoint(path=path, step=training["step"], loader_state=loader_state, progress=training["progress"])


def _check_numbers(step: int, keep: int | None) -> None:
    if step < 0:
        raise ConfigError("save_checkpoint(step=)", expected="0 or more", got=step, do="give the number of optimizer steps done")
    if keep is not None and keep < 1:
        raise ConfigError("save_checkpoint(keep=)", expected="1 or more, or None for all", got=keep, do="keep at least one checkpoint")


def _take_apart(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Stateful | None) -> tuple[dict[str, Tensor], Json]:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler and scheduler.state_dict()}
    tensors: dict[str, Tensor] = {}
    trees: dict[str, Json] = {}
    for name, part in parts.items():
        found, trees[name] = split_state(part, name)
        tensors |= found
    # The outer dict is encoded like the inner ones, so that one call puts all of it together.
    return tensors, {"dict": [[name, tree] for name, tree in trees.items()]}


def _write_tensors(path: Path, tensors: dict[str, Tensor], dp: DataParallelGroup, where: str) -> None:
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        with warnings.catch_warnings():
            _expect_single_process()
            save_tensors(tensors, storage_writer=FileSystemWriter(path), planner=planner, process_group=dp.group, no_dist=dp.size == 1)
    except CheckpointException as error:  # a BaseException, and it hides the failures of each rank
        failures = {rank: repr(failure[0]) for rank, failure in error.failures.items()}
        message = f"expected all ranks to write their tensors, got {failures}; check the space and the rights on {path.parent}"
        raise SynchronizationError(f"{where}, writing", message, missing=sorted(failures)) from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    reader = FileSystemReader(path)
    found = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for key, metadata in found.items():
        assert isinstance(metadata, TensorStorageMetadata), "only tensors are given to torch.distributed.checkpoint"
        tensors[key] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
    with warnings.catch_warnings():
        _expect_single_process()
        # Every rank reads all it needs by itself: there is nothing to agree on.
        load_tensors(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _expect_single_process() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized", category=UserWarning)


def _saved_dp_size(path: Path) -> int:
    manifest = files.read_manifest(path)
    if manifest is None:
        raise ConfigError(
            f"load_checkpoint({str(path)!r})",
            expected="a complete checkpoint",
            got="none, or one with missing or short files" if path.exists() else "no such directory",
            do="take the path from latest_checkpoint(directory)",
        )
    return int(manifest["dp_size"])


def _read_loader_state(path: Path, num_saved: int, dp: DataParallelGroup) -> Json:
    """Return this rank's loader state; where another number of ranks saved, all of theirs as one."""
    if num_saved == dp.size:
        return files.read_json(path / files.loader_file(dp.rank))
    states = [files.read_json(path / files.loader_file(rank)) for rank in range(num_saved)]
    if not any(states):
        return None
    try:
        return merge(states)
    except ResumeError as error:
        do = f"Saved by dp_size {num_saved}, this run has {dp.size}; restart with {num_saved} ranks"
        raise ResumeError([("dp_size", num_saved, dp.size), *error.differences], do=do) from error


def _check_same(state: Any, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Stateful | None) -> None:
    saved, present = _describe(state["model"]), _describe(model.state_dict())
    names = [*present, *(name for name in saved if name not in present)]
    differences: list[tuple[str, object, object]] = [
        (f"model, {name}", saved.get(name, "nothing"), present.get(name, "nothing"))
        for name in names
        if saved.get(name) != present.get(name)
    ]
    saved_groups, groups = (_group_sizes(groups) for groups in (state["optimizer"]["param_groups"], optimizer.param_groups))
    if saved_groups != groups:
        differences.append(("optimizer, parameters in each group", saved_groups, groups))
    saved_scheduler, present_scheduler = ("no state" if one is None else "a state" for one in (state["scheduler"], scheduler))
    if saved_scheduler != present_scheduler:
        differences.append(("scheduler", saved_scheduler, present_scheduler))
    if differences:
        raise ResumeError(differences, do="Build the model, optimizer and scheduler as in the run that saved it")


def _describe(state: Mapping[str, Any]) -> dict[str, str]:
    def describe(value: Any) -> str:
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else "extra state"

    return {name: describe(value) for name, value in state.items()}


def _group_sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _take_over(state: Any, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Stateful | None) -> None:
    model_state = model.state_dict()
    model_state.update(state["model"])  # keeps the versions of the modules, which travel as an attribute
    model.load_state_dict(model_state)
    optimizer.load_state_dict(state["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
