"""A file that grows at its end and can be taken up again at a length that it once had."""

from __future__ import annotations

import os
from pathlib import Path

from aioloader.errors import SourceError

__all__ = ["AppendFile"]

BUFFER_BYTES = 1 << 20  # documents are a few KB; one write for many of them


class AppendFile:
    """Writes `header`, whose final content may be known only at the end, and then data.

    Args:
        path: The file; without `num_data_bytes` an existing one is replaced.
        header: Written first, and again when the file is taken up, since closing may have changed it.
        num_data_bytes: How much data after the header to keep.

    Raises:
        SourceError: The file is shorter than that.
    """

    def __init__(self, path: Path, header: bytes, num_data_bytes: int | None = None) -> None:
        self.path = path
        self._num_header_bytes = len(header)
        self.num_data_bytes = num_data_bytes or 0
        length = len(header) + self.num_data_bytes
        if num_data_bytes is not None:
            _check_length(path, length)
        # Kept open for as long as this object lives; release() closes it.
        self._file = open(path, "w+b" if num_data_bytes is None else "r+b", buffering=BUFFER_BYTES)  # noqa: SIM115
        self._file.truncate(length)
        self._file.write(header)
        self._file.seek(length)

    def write(self, data: memoryview | bytes) -> None:
        """Append data."""
        self._file.write(data)
        self.num_data_bytes += len(data)

    def sync(self) -> int:
        """Flush to the disk and return the length of the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._num_header_bytes + self.num_data_bytes

    def replace_header(self, header: bytes) -> None:
        """Put the final header, which is as long as the first one was, before the data."""
        if len(header) != self._num_header_bytes:
            raise AssertionError(f"a header of {len(header)} bytes for {self._num_header_bytes}")
        self._file.seek(0)
        self._file.write(header)
        self._file.seek(0, os.SEEK_END)

    def read_data(self, start: int, num_bytes: int) -> bytes:
        """Return data written before."""
        self._file.seek(self._num_header_bytes + start)
        data = self._file.read(num_bytes)
        self._file.seek(0, os.SEEK_END)
        return data

    def release(self) -> None:
        """Close the descriptor; safe to call twice."""
        self._file.close()


def _check_length(path: Path, length: int) -> None:
    present = path.stat().st_size if path.exists() else 0
    if present < length:
        raise SourceError(
            f"{path}: expected at least the {length} bytes of the saved position, got {present}; remove the output and start afresh."
        )
