"""A callback that logs steps as JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import TextIO

from aioloader.training.averages import StepScalars
from aioloader.training.reports import StepReport

__all__ = ["JsonLinesLog"]


class JsonLinesLog:
    """Appends `{"step": 20, "train/loss": 2.5, ...}` to a file; for `Trainer(on_step=)`. Rank 0 writes.

    A run that was resumed first takes out the lines of the steps that are done again. Every line is flushed.

    Args:
        path: The file.
        every: Steps between two lines, over which they are averages.

    Raises:
        ConfigError: `every` is below 1.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 1) -> None:
        self._path = Path(path)
        self._scalars = StepScalars(every)
        self._file: TextIO | None = None

    def __call__(self, report: StepReport) -> None:
        """Take the report of a step."""
        scalars = self._scalars.take(report)
        if not scalars:
            return
        if self._file is None:
            self._file = self._open(self._scalars.first_step)
        self._file.write(json.dumps({"step": report.step, **scalars}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> JsonLinesLog:
        """Return the callback; leaving the block closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file."""
        self.close()

    def _open(self, first_step: int) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            self._path.write_text("".join(line for line in lines if _is_before(line, first_step)), encoding="utf-8")
        return open(self._path, "a", encoding="utf-8")


def _is_before(line: str, step: int) -> bool:
    """Return whether the line is whole and of an earlier step."""
    try:
        return line.endswith("\n") and int(json.loads(line)["step"]) < step
    except (ValueError, KeyError, TypeError):
        return False
