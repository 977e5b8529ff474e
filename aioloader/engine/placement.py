"""Where samples will lie in their micro-batch, known before they are made: workers can then write them there.

That is so where micro-batches have a fixed number of samples and each record gives one. It is only a guess: where records are
filtered, or samples are of another shape, they are copied as usual; where that happens all the time, guessing is given up.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from aioloader.pools.chunk import Chunk, Destination, Room

__all__ = ["Placement", "Reserved", "Reserving"]

_MAX_MISSES = 8


class Reserved(NamedTuple):
    """A segment for a micro-batch to be: the rooms of its first row, and the bytes from one row of each field to the next."""

    destination: Destination
    strides: dict[str, int]


class Reserving(Protocol):
    """Whoever owns the segments."""

    num_placed: int
    """Micro-batches that were found complete in the segment reserved for them."""
    num_missed: int
    """Those that had to be copied."""

    def reserve(self, num_rows: int) -> Reserved | None:
        """Return a segment for a micro-batch of so many samples, None if it is not worth it or the shape is not known yet."""

    def is_worth_it(self, num_rows: int) -> bool:
        """Return whether `reserve` would return a segment."""


class Placement:
    """Deals the rows of micro-batches to chunks, in the order in which chunks are cut. Pure."""

    def __init__(self, batch_size: int, reserving: Reserving) -> None:
        self._batch_size = batch_size
        self._reserving = reserving
        self._row = 0
        self._reserved: Reserved | None = None

    def begin_epoch(self) -> None:
        """Note that what comes next starts a micro-batch; let go of what was reserved for the last one."""
        self._row = 0
        self._reserved = None

    def limit(self, num_records: int) -> int:
        """Return how many records to put in the next chunk, so that it does not reach into another micro-batch.

        What would be left for one that is smaller than half of it goes along: a chunk costs the same whatever its size.
        """
        is_hopeless = self._reserving.num_missed > _MAX_MISSES + self._reserving.num_placed
        if self._row == 0:
            self._reserved = None if is_hopeless else self._reserving.reserve(self._batch_size)
        if self._reserved is None and (is_hopeless or not self._reserving.is_worth_it(self._batch_size)):
            return num_records
        num_left = self._batch_size - self._row
        return num_left if 2 * num_left <= 3 * num_records else num_records

    def place(self, chunk: Chunk) -> Chunk:
        """Return the chunk with its destination."""
        row, num_rows = self._row, len(chunk.records)
        self._row = (row + num_rows) % self._batch_size
        if self._reserved is None:
            return chunk
        whole, strides = self._reserved
        rooms: dict[str, Room] = {name: (dtype, shape, at + row * strides[name]) for name, (dtype, shape, at) in whole.rooms.items()}
        destination = Destination(whole.number, whole.nbytes, rooms, num_rows, whole.descriptor, whole.memory)
        return chunk._replace(destination=destination)
