"""Where documents end in the flat stream of tokens: kept on disk, not in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from aioloader.tokens.append_file import AppendFile
from aioloader.tokens.npy import npy_header

__all__ = ["DocumentLog", "OffsetLog"]

OFFSET = np.dtype("<i8")


class DocumentLog(Protocol):
    """Takes the ends of documents, offsets in the flat stream, in rising order."""

    def append(self, ends: npt.NDArray[np.int64]) -> None:
        """Append the ends of the next documents."""

    def sync(self) -> dict[str, int]:
        """Flush to the disk and return the length of each file by name."""

    def finish(self) -> list[Path]:
        """Write what comes last and return the files."""

    def release(self) -> None:
        """Close descriptors; safe to call twice."""


class OffsetLog:
    """An int64 .npy of the offsets: 0, and the end of each document.

    Args:
        path: The file.
        num_documents: To go on after so many; None to start afresh.
    """

    def __init__(self, path: Path, num_documents: int | None) -> None:
        self._num_documents = num_documents or 0
        self._file = AppendFile(path, self._header(), None if num_documents is None else (num_documents + 1) * OFFSET.itemsize)
        if num_documents is None:
            self._file.write(bytes(OFFSET.itemsize))

    def append(self, ends: npt.NDArray[np.int64]) -> None:
        """See `DocumentLog.append`."""
        self._file.write(ends.astype(OFFSET).tobytes())
        self._num_documents += len(ends)

    def sync(self) -> dict[str, int]:
        """See `DocumentLog.sync`."""
        return {self._file.path.name: self._file.sync()}

    def finish(self) -> list[Path]:
        """Write the number of documents into the header."""
        self._file.replace_header(self._header())
        self._file.sync()
        return [self._file.path]

    def release(self) -> None:
        """See `DocumentLog.release`."""
        self._file.release()

    def _header(self) -> bytes:
        return npy_header(OFFSET, (self._num_documents + 1,))
