"""A page of shared memory in which a worker notes what it is doing, so that its death or silence can be laid to a record.

Chunks have rising numbers. The engine can take back one that has not begun, for a worker that has nothing to do.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Place", "ProgressPage"]

_NUMBER, _INDEX, _SINCE, _REVOKED = 0, 1, 2, 3
_IDLE = -1


class Place(NamedTuple):
    """What a worker was doing: the record at `record_index` of chunk `number`, since `since_ns` of the monotonic clock."""

    number: int
    record_index: int
    since_ns: int


class ProgressPage:
    """Written by one worker, read by the engine. Costs the worker about 0.1 us per record."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("aioloader-progress", os.MFD_CLOEXEC) if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._mmap = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._cells = memoryview(self._mmap).cast("q")
        if descriptor is None:
            self._cells[_NUMBER] = self._cells[_REVOKED] = _IDLE

    def begin_chunk(self, number: int) -> bool:
        """Note that a chunk begins, with its first record; return False if it was revoked and must not be run."""
        self._cells[_INDEX] = 0
        self._cells[_SINCE] = time.monotonic_ns()
        self._cells[_NUMBER] = number
        return self._cells[_REVOKED] < number

    def revoke(self, number: int) -> bool:
        """Take back the last chunk sent, on the engine's side; return False if it has begun, or may just be beginning.

        Each side writes its cell before it reads the other's, and the interpreter does so much in between that at least one sees
        what the other did. If neither ever should, the chunk is run twice, to the same result.
        """
        self._cells[_REVOKED] = number
        return self._cells[_NUMBER] < number

    def marker(self) -> Callable[[int], None]:
        """Return a function that notes that the record of an index begins; it is called for each, so it looks nothing up."""
        cells, clock = self._cells, time.monotonic_ns

        def begin_record(index: int) -> None:
            cells[_INDEX] = index
            cells[_SINCE] = clock()

        return begin_record

    def end_chunk(self) -> None:
        """Note that the chunk's block was sent."""
        self._cells[_NUMBER] = _IDLE

    def place(self) -> Place | None:
        """Return what the worker is doing, None when it is idle."""
        number = self._cells[_NUMBER]
        return None if number == _IDLE else Place(number, self._cells[_INDEX], self._cells[_SINCE])

    def close(self) -> None:
        """Unmap and close."""
        self._cells.release()
        self._mmap.close()
        os.close(self.descriptor)
