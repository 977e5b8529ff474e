"""The checkpoints of a training run: which one to begin with, and writing new ones, at once or in the background."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from aioloader.errors import ConfigError, SynchronizationError
from aioloader.protocols import Json
from aioloader.training.checkpoints.background_save import BackgroundSaver
from aioloader.training.checkpoints.checkpoint import Checkpoint, load_checkpoint, write_snapshot
from aioloader.training.checkpoints.files import complete_checkpoints, step_path
from aioloader.training.checkpoints.snapshot import TrainingParts
from aioloader.training.groups.dp_group import DataParallelGroup
from aioloader.training.reports import MicroBatch
from aioloader.training.run_options import RunOptions

__all__ = ["RunCheckpoints"]


class RunCheckpoints:
    """Loads and saves what `options` name, on all ranks alike; without a directory it does nothing.

    Attributes:
        path: The last checkpoint, loaded or saved.
        step: Its step; -1 if there is none.
    """

    def __init__(self, options: RunOptions, dp: DataParallelGroup) -> None:
        self._options = options
        self._dp = dp
        self._parts = TrainingParts(
            model=options.model, optimizer=options.optimizer, scheduler=options.scheduler, precision=options.precision
        )
        self._saver: BackgroundSaver | None = None
        self._stack = ExitStack()
        self.path: Path | None = None
        self.step = -1

    def __enter__(self) -> RunCheckpoints:
        """Make what saving in the background needs."""
        options = self._options
        if options.checkpoint_async and options.checkpoint_dir is not None:
            self._saver = self._stack.enter_context(BackgroundSaver(options.checkpoint_dir, self._dp, options.keep_checkpoints))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for a save under way."""
        self._stack.__exit__(kind, error, trace)

    @property
    def has_failed(self) -> bool:
        """Return whether this rank knows of a save in the background that failed."""
        return self._saver is not None and self._saver.has_failed

    def restore(self) -> Checkpoint | None:
        """Load the latest checkpoint, which must be the same for all ranks, and return what else it holds.

        Raises:
            ConfigError: There is one, and the run is to start afresh.
            ResumeError: It does not fit the run.
            SynchronizationError: The ranks see different checkpoints.
        """
        options = self._options
        if options.checkpoint_dir is None:
            return None
        found = complete_checkpoints(options.checkpoint_dir)
        latest = found[-1][0] if found else -1
        self._check_common(latest)
        if latest < 0:
            return None
        if not options.resume:
            got, do = f"step {latest} in {options.checkpoint_dir}", "give another directory, or empty this one"
            raise ConfigError("resume=False", expected="a checkpoint_dir without checkpoints", got=got, do=do)
        path, parts = step_path(options.checkpoint_dir, latest), (options.model, options.optimizer, options.scheduler)
        loaded = load_checkpoint(path, *parts, precision=options.precision, mesh=options.mesh, timeout_s=options.timeout_s)
        self.path, self.step = loaded.path, loaded.step
        return loaded

    def save(self, step: int, last_batch: MicroBatch, progress: Mapping[str, Json]) -> None:
        """Save the state after `step`, which ended with `last_batch`, unless that is done; in the background where that was asked for.

        Raises:
            ConfigError: The state cannot be saved.
            SynchronizationError: Another rank failed or is missing.
        """
        directory = self._options.checkpoint_dir
        if directory is None or self.step == step:
            return
        with self._dp.together(f"save_checkpoint, step {step}, taking the state"):
            loader_state = self._options.loader.state_dict(after=last_batch)
            snapshot = self._parts.snapshot(step, loader_state, progress, whole=self._dp.rank == 0, copied=self._saver is not None)
        if self._saver is None:
            self.path = write_snapshot(directory, snapshot, self._dp, self._options.keep_checkpoints)
        else:
            self._saver.start(snapshot)
        self.step = step

    def finish(self) -> None:
        """Wait for a save under way.

        Raises:
            BaseException: What made it fail here, or a `SynchronizationError` that names the rank where it failed.
        """
        if self._saver is not None:
            self.path = self._saver.finish() or self.path

    def _check_common(self, latest: int) -> None:
        high, low = self._dp.reduce_numbers([latest, -latest], "comparison of checkpoints", op=dist.ReduceOp.MAX)
        if high != -low:
            message = f"expected the same latest checkpoint on all ranks, got steps {-low:.0f} and {high:.0f}; share the directory"
            raise SynchronizationError("resume", message)
