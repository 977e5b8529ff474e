"""A reader of anything that gives a record by its index: it seeks without reading."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from aioloader.errors import ClosedError
from aioloader.protocols import Cursor, Record, Span
from aioloader.sources.place import cursor_error, number_records
from aioloader.sources.pull import PATIENCE_S, Pulled, source_error

__all__ = ["IndexedReader"]

FIRST_PIECE = 16
"""Records asked for at once before their cost is known."""


class IndexedReader:
    """Reads records `cursor` to `num_records - 1` in order. The cursor is the index of the next record.

    Args:
        name: The shard part of the record ids.
        num_records: Records of the whole source.
        one: Returns the record at an index.
        many: Returns the records from one index up to another, where that is cheaper than one by one. How many are asked for
            at once follows what they cost, so `many` must give the same records as `one`.
        cursor: Where to read from.

    Raises:
        ResumeError: `cursor` is not an index of this source.
    """

    def __init__(
        self,
        name: str,
        num_records: int,
        one: Callable[[int], Record],
        many: Callable[[int, int], Sequence[Record]] | None,
        cursor: Cursor | None,
    ) -> None:
        index = 0 if cursor is None else cursor
        if type(index) is not int or not 0 <= index <= num_records:
            raise cursor_error(name, cursor, f"an index from 0 to {num_records}")
        self._name = name
        self._num_records = num_records
        self._one = one
        self._many = many
        self._next = index
        self._piece = FIRST_PIECE
        self._stride = 1
        self._failure: BaseException | None = None
        self._closed = False

    def read(self, max_records: int) -> Span | None:
        """See `aioloader.protocols.Reader.read`."""
        if self._closed:
            raise ClosedError(f"source {self._name}: expected an open reader, got a closed one; open the source again.")
        if self._failure is not None:
            raise self._failure
        first = self._next
        stop = min(first + max_records, self._num_records)
        if first == stop:
            return None
        pulled = self._pull_pieces(first, stop) if self._many is not None else self._pull_singly(first, stop)
        self._next += len(pulled.records)
        if pulled.failure is not None:
            self._failure = source_error(pulled.failure, (self._name, self._next))
            if not pulled.records:
                raise self._failure
        return Span(pulled.records, number_records(self._name, first, self._next))

    def cursor(self) -> Cursor:
        """See `aioloader.protocols.Reader.cursor`."""
        return self._next

    def close(self) -> None:
        """See `aioloader.protocols.Reader.close`."""
        self._closed = True

    def _pull_singly(self, first: int, stop: int) -> Pulled:
        """Read one by one until time is up; the clock is read after every few records, as long as those come fast."""
        records: list[Record] = []
        one, append = self._one, records.append
        started = time.monotonic()
        now = started
        try:
            while first < stop and now - started < PATIENCE_S:
                end = min(first + self._stride, stop)
                for index in range(first, end):
                    append(one(index))
                first, before, now = end, now, time.monotonic()
                self._stride = 1 if now - before > PATIENCE_S / 4 else min(FIRST_PIECE, 2 * self._stride)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:  # noqa: BLE001 - settled by the caller, after the records before it
            return Pulled(records, failure=failure)
        return Pulled(records)

    def _pull_pieces(self, first: int, stop: int) -> Pulled:
        """Read piece by piece until time is up; a piece that fails is read one by one, to find the record."""
        records: list[Record] = []
        deadline = time.monotonic() + PATIENCE_S
        while first < stop and (not records or time.monotonic() < deadline):
            piece = self._timed_piece(first, min(first + self._piece, stop))
            if piece is None:
                singly = self._pull_singly(first, min(first + self._piece, stop))
                return Pulled(records + singly.records, singly.failure)
            records.extend(piece)
            first += len(piece)
        return Pulled(records)

    def _timed_piece(self, first: int, stop: int) -> list[Record] | None:
        """Return the records of one piece, or None where they could not be had; adapt the size of the next piece."""
        assert self._many is not None
        started = time.monotonic()
        try:
            piece = list(self._many(first, stop))
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - the reading one by one that follows raises it at its record
            return None
        if len(piece) != stop - first:
            return None
        if time.monotonic() - started > PATIENCE_S / 2:
            self._piece = max(1, self._piece // 2)
        elif stop - first == self._piece:
            self._piece *= 2
        return piece
