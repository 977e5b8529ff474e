"""Saves and loads model, optimizer, scheduler and loader state at an optimizer-step border.

Tensors go through torch.distributed.checkpoint, all else is JSON. A checkpoint appears at once and complete, or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from aioloader.errors import ConfigError, ResumeError
from aioloader.order.mesh import Mesh
from aioloader.protocols import Json
from aioloader.state import merge
from aioloader.training.checkpoints import files
from aioloader.training.checkpoints.files import latest_checkpoint
from aioloader.training.checkpoints.snapshot import Snapshot, Stateful, TrainingParts
from aioloader.training.checkpoints.state_tree import join_state
from aioloader.training.checkpoints.tensor_files import read_tensors, write_tensors
from aioloader.training.groups.dp_group import DEFAULT_TIMEOUT_S, DataParallelGroup

__all__ = ["Checkpoint", "Stateful", "latest_checkpoint", "load_checkpoint", "save_checkpoint", "write_snapshot"]


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
    optimizer: torch.optim.Optimizer | None,
    scheduler: Stateful | None = None,
    loader_state: Json = None,
    *,
    precision: Stateful | None = None,
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
        optimizer: Saved with its parameter groups; None where `precision` has it.
        scheduler: Saved where given.
        loader_state: JSON-compatible; each rank saves its own.
        precision: Saved where given: a `MixedPrecisionManager`, with its optimizer and scheduler.
        progress: More JSON-compatible data; that of rank 0 is kept.
        keep: How many checkpoints to keep, this one counted; None: all.
        mesh: Where this rank stands; default: from the process group, else from torchrun's environment.
        group: The data-parallel process group; default: all ranks.
        timeout_s: How long to wait for the other ranks.

    Raises:
        ConfigError: `keep` or `step` is out of range, a state cannot be saved without pickle, or the directory is not shared or full.
        SynchronizationError: Another rank failed or is missing. The checkpoint does not exist then.
    """
    _check_numbers(step, keep)
    dp = DataParallelGroup.resolve(mesh, group, timeout_s)
    parts = TrainingParts(model=model, optimizer=optimizer, scheduler=scheduler, precision=precision)
    with dp.together(f"save_checkpoint, step {step}, taking the state"):
        snapshot = parts.snapshot(step, loader_state, progress, whole=dp.rank == 0, copied=False)
    return write_snapshot(Path(directory), snapshot, dp, keep)


def write_snapshot(directory: Path, snapshot: Snapshot, dp: DataParallelGroup, keep: int | None) -> Path:
    """Write the checkpoint of a snapshot and return its path; called on every rank, with the snapshot of each.

    Raises:
        ConfigError: See `save_checkpoint`.
        SynchronizationError: Another rank failed or is missing. The checkpoint does not exist then.
    """
    where = f"save_checkpoint, step {snapshot.step}"
    with dp.together(f"{where}, preparing"):
        if dp.rank == 0:
            files.prepare(directory, snapshot.step)
    with dp.together(f"{where}, writing"):
        partial = files.partial_path(directory, snapshot.step)
        files.write_json(partial / files.loader_file(dp.rank), snapshot.loader_state)
        if dp.rank == 0:
            write_tensors(partial, snapshot.tensors)
            training = {"step": snapshot.step, "progress": dict(snapshot.progress), "state": snapshot.tree}
            files.write_json(partial / files.TRAINING, training)
    with dp.together(f"{where}, publishing"):
        if dp.rank == 0:
            files.publish(directory, snapshot.step, dp.size)
            if keep is not None:
                files.remove_older(directory, snapshot.step, keep)
    return files.step_path(directory, snapshot.step)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Stateful | None = None,
    *,
    precision: Stateful | None = None,
    mesh: Mesh | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Checkpoint:
    """Load the checkpoint in `path` (see `latest_checkpoint`), every value bit for bit; call it on every rank.

    Everything is compared before anything is changed. The tensors' index is read by torch with pickle: load only checkpoints
    that you trust.

    Raises:
        ConfigError: There is no complete checkpoint in `path`.
        ResumeError: It was saved by another model, optimizer, scheduler or precision manager, or by another number of data-parallel
            ranks with loaders whose states cannot be merged.
        SynchronizationError: Another rank failed or is missing.
    """
    dp = DataParallelGroup.resolve(mesh, group, timeout_s)
    path = Path(path)
    with dp.together(f"load_checkpoint({str(path)!r})"):
        num_saved = _saved_dp_size(path)
        loader_state = _read_loader_state(path, num_saved, dp)
        training = files.read_json(path / files.TRAINING)
        state = join_state(training["state"], read_tensors(path))
        TrainingParts(model=model, optimizer=optimizer, scheduler=scheduler, precision=precision).take_over(state)
    return Checkpoint(path=path, step=training["step"], loader_state=loader_state, progress=training["progress"])


def _check_numbers(step: int, keep: int | None) -> None:
    if step < 0:
        raise ConfigError("save_checkpoint(step=)", expected="0 or more", got=step, do="give the number of optimizer steps done")
    if keep is not None and keep < 1:
        raise ConfigError("save_checkpoint(keep=)", expected="1 or more, or None for all", got=keep, do="keep at least one checkpoint")


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
