"""Where micro-batches go that wait for another lane's turn when they are too many for memory: a temporary file.

Lanes take turns. Where the records of one lane give more than those of another (in every pair of records the second is the longer
one, say), it gets ahead of the other without end, and all that it is ahead has been read and must not be lost.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import IO, NamedTuple

from aioloader.errors import HostError
from aioloader.pools.transport import decode, encode, write
from aioloader.protocols import Group

__all__ = ["Overflow", "Stored", "describe_failure", "describe_overflow"]

_FILE_BYTES = 1 << 28
"""Room is given back to the disk file by file: once nothing in one is needed any more."""


class Stored(NamedTuple):
    """A place in a file, and how what is there divides."""

    file: _File
    offset: int
    sizes: Sequence[int]
    nbytes: int


class Overflow:
    """Stores micro-batches and loads each of them once. The files have no names, so that they end with the process.

    Attributes:
        total: The micro-batches stored so far.
        nbytes: The bytes on disk now.
        has_failed: Whether storing failed once, so that it is not tried again.
    """

    def __init__(self, file_bytes: int = _FILE_BYTES) -> None:
        self.total = 0
        self.nbytes = 0
        self.has_failed = False
        self._file_bytes = file_bytes
        self._files: list[_File] = []

    def store(self, group: Group) -> Stored:
        """Write down the samples of a micro-batch.

        Raises:
            OSError: The disk is full, or there is no folder for temporary files.
            Exception: A sample cannot be serialised.
        """
        encoded = encode(group, stays_here=True)
        data = memoryview(bytearray(encoded.nbytes))
        write(encoded, data)
        if not self._files or self._files[-1].end >= self._file_bytes:
            self._files.append(_File())
        stored = self._files[-1].append(data, encoded.sizes)
        self.total += 1
        self.nbytes += stored.nbytes
        return stored

    def load(self, stored: Stored) -> Group:
        """Return what was stored, and forget it.

        Raises:
            HostError: It cannot be read back.
        """
        try:
            data = stored.file.take(stored)
        except OSError as error:
            raise HostError(
                f"temporary file in {_folder()}: expected a micro-batch of {stored.nbytes} bytes that was written there, got "
                f"{error}; load the last state_dict() into a new loader."
            ) from error
        group: Group = decode(stored.sizes, data)
        self.nbytes -= stored.nbytes
        if not stored.file.num_stored:
            self._files.remove(stored.file)
            stored.file.close()
        return group

    def close(self) -> None:
        """Give everything back to the disk; safe to call twice."""
        for file in self._files:
            file.close()
        self._files.clear()
        self.nbytes = 0


class _File:
    """A file without a name."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="aioloader-", buffering=0)  # noqa: SIM115 - closed by `close`
        self.end = 0
        self.num_stored = 0

    def append(self, data: memoryview, sizes: Sequence[int]) -> Stored:
        done = 0
        while done < len(data):  # a full disk takes a part first, and says so after that
            done += os.pwrite(self._file.fileno(), data[done:], self.end + done)
        stored = Stored(self, self.end, sizes, done)
        self.end += done
        self.num_stored += 1
        return stored

    def take(self, stored: Stored) -> memoryview:
        data = memoryview(bytearray(stored.nbytes))
        done = 0
        while done < stored.nbytes:
            number = os.preadv(self._file.fileno(), [data[done:]], stored.offset + done)
            if not number:
                raise OSError(f"its end after {done} bytes")
            done += number
        self.num_stored -= 1
        return data

    def close(self) -> None:
        self._file.close()


def describe_overflow(lane: int, num_waiting: int) -> str:
    """Return the log line for the first micro-batch that is stored."""
    return (
        f"lane {lane}: expected micro-batches that are delivered soon, got {num_waiting} that wait for the turn of other lanes of this "
        f"rank, whose records give fewer; more of them wait on disk, in {_folder()}. Shuffle the records, or use as many "
        "lanes as there are data-parallel ranks, and lanes stay together."
    )


def describe_failure(error: Exception) -> str:
    """Return the log line for one that could not be stored."""
    do = "point TMPDIR to a disk with room" if isinstance(error, OSError) else "return arrays or plain data"
    return (
        f"micro-batches that wait for other lanes: expected to store them in {_folder()}, got {type(error).__name__}: {error}; they stay "
        f"in memory, beyond its limit. To mend that, {do}, or shuffle the records so that lanes stay together."
    )


def _folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # it tries to write there
        return "a temporary folder"
