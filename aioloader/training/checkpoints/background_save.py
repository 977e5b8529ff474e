"""Writes checkpoints in a thread while training goes on.

trainer     step | snapshot to CPU memory | step | step | ...        | step: was there a failure?
thread                                    | write, flush, publish    |
"""

from __future__ import annotations

import datetime
import logging
import threading
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from aioloader.training.checkpoints.checkpoint import write_snapshot
from aioloader.training.checkpoints.snapshot import Snapshot
from aioloader.training.groups.dp_group import DataParallelGroup

__all__ = ["BackgroundSaver"]

_log = logging.getLogger("aioloader")


class BackgroundSaver:
    """Writes one snapshot at a time in a thread, on all ranks alike. A failure is kept until `finish`.

    The threads of the ranks talk in a gloo group of their own: collectives of two threads in one group would get mixed up. Make it
    on every rank, and leave its block on every rank; leaving it waits for the checkpoint that is being written.

    Args:
        directory: Shared by all ranks.
        dp: The ranks that save together: all ranks of the default process group.
        keep: How many checkpoints to keep; None: all.
    """

    def __init__(self, directory: Path, dp: DataParallelGroup, keep: int | None) -> None:
        self._directory = directory
        self._keep = keep
        self._group: dist.ProcessGroup | None = None
        if dp.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=dp.timeout_s))
        self._dp = DataParallelGroup.resolve(dp.mesh, self._group, dp.timeout_s)
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Return whether the last save is known to have failed on this rank."""
        return self._error is not None

    def start(self, snapshot: Snapshot) -> None:
        """Begin to write `snapshot`, whose tensors nobody changes; waits for the save before it.

        Raises:
            BaseException: The save before it failed; see `finish`.
        """
        self.finish()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="aioloader-checkpoint")
        self._thread.start()

    def finish(self) -> Path | None:
        """Wait for the save under way, and return the path of the last checkpoint, if there is one.

        Raises:
            BaseException: What made the save fail on this rank, or a `SynchronizationError` that names the rank where it failed.
        """
        self._join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._path

    def __enter__(self) -> BackgroundSaver:
        """Return the saver."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for the save under way; another error may be on its way, so that a failed save is only logged here."""
        self._join()
        if self._error is not None:
            _log.error("The last checkpoint was not saved: %s", self._error)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self._path = write_snapshot(self._directory, snapshot, self._dp, self._keep)
        except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread
            self._error = error
