"""A callback that logs steps for TensorBoard."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING

from aioloader.errors import ConfigError
from aioloader.training.averages import StepScalars
from aioloader.training.reports import StepReport

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger:
    """Writes averages of steps, evaluations and the state of the ranks as scalars; for `Trainer(on_step=)`. Rank 0 writes.

    A run that was resumed hides what the log has of the steps that are done again. Every entry is flushed.

    Args:
        directory: The log directory of this run.
        every: Steps between two entries, over which they are averages.

    Raises:
        ConfigError: The package `tensorboard` is missing, or `every` is below 1.
    """

    def __init__(self, directory: str | os.PathLike[str], *, every: int = 10) -> None:
        _require_tensorboard()
        self._directory = directory
        self._scalars = StepScalars(every)
        self._writer: SummaryWriter | None = None

    def __call__(self, report: StepReport) -> None:
        """Take the report of a step."""
        scalars = self._scalars.take(report)
        if not scalars:
            return
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(self._directory, purge_step=self._scalars.first_step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, report.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file and end the thread that writes it."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> TensorBoardLogger:
        """Return the callback; leaving the block closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file."""
        self.close()


def _require_tensorboard() -> None:
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        do = "pip install tensorboard, or log with JsonLinesLog"
        raise ConfigError("TensorBoardLogger", expected="the package tensorboard", got=str(error), do=do) from error
