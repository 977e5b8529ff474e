"""Megatron's indexed data set, written: tokens as they come, lengths beside them, and the rest of the index at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioloader.errors import ConfigError
from aioloader.tokens.append_file import AppendFile
from aioloader.tokens.megatron_index import index_header

__all__ = ["LengthLog"]

BLOCK = 1 << 16
MAX_LENGTH = (1 << 31) - 1


class LengthLog:
    """The index, with one sequence for each document. Lengths are streamed, the rest is computed from them at the end.

    Args:
        path: The `.idx` file.
        dtype: The type of the tokens.
        num_documents: To go on after so many; None to start afresh.
        last_end: The end of the last of these.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], num_documents: int | None, last_end: int) -> None:
        self._dtype = dtype
        self._num_documents = num_documents or 0
        self._last_end = last_end
        header = index_header(dtype, self._num_documents, self._num_documents)
        self._file = AppendFile(path, header, None if num_documents is None else 4 * num_documents)

    def append(self, ends: npt.NDArray[np.int64]) -> None:
        """Append the lengths of the documents that end there."""
        lengths = np.diff(ends, prepend=self._last_end)
        if lengths.max(initial=0) > MAX_LENGTH:
            raise ConfigError(
                f"{self._file.path}: append",
                expected=f"documents of at most {MAX_LENGTH} tokens",
                got=f"one of {lengths.max()}",
                do="give document_ends, or split the document",
            )
        self._file.write(lengths.astype("<i4").tobytes())
        self._last_end = int(ends[-1])
        self._num_documents += len(ends)

    def sync(self) -> dict[str, int]:
        """See `aioloader.tokens.document_log.DocumentLog`."""
        return {self._file.path.name: self._file.sync()}

    def finish(self) -> list[Path]:
        """Append pointers and document boundaries, a block at a time, and write the counts into the header."""
        pointer = 0
        for first in range(0, self._num_documents, BLOCK):
            count = min(BLOCK, self._num_documents - first)
            lengths = np.frombuffer(self._file.read_data(4 * first, 4 * count), "<i4")
            ends = pointer + np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
            self._file.write(np.concatenate([[pointer], ends[:-1]]).astype("<i8").tobytes())
            pointer = int(ends[-1])
        for first in range(0, self._num_documents + 1, BLOCK):
            self._file.write(np.arange(first, min(first + BLOCK, self._num_documents + 1), dtype="<i8").tobytes())
        self._file.replace_header(index_header(self._dtype, self._num_documents, self._num_documents))
        self._file.sync()
        return [self._file.path]

    def release(self) -> None:
        """See `aioloader.tokens.document_log.DocumentLog`."""
        self._file.release()
