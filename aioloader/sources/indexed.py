"""A reader of anything that gives a record by shard and row: it seeks without reading, and reads one rank's share only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aioloader.errors import ClosedError
from aioloader.protocols import Cursor, IndexedSource, Record, RecordId, Share, Span
from aioloader.sequences import RowIds
from aioloader.sources.place import cursor_error
from aioloader.sources.pull import PATIENCE_S, Pulled, source_error

__all__ = ["IndexedReader", "Locate", "read_positions"]

FIRST_PIECE = 16
"""Records asked for at once before their cost is known; also the most, where many at once cost as much as one by one."""

_WHOLE = Share()


class Locate(Protocol):
    """An order of the records."""

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard and the row of each position."""


class IndexedReader:
    """Reads the records of an indexed source by rising position.

    The cursor is the next position. Where a run goes on with what another left (see `aioloader.state`), it is {"left", "then", "at"}:
    first the positions `left`, one by one, then those from `then` on; `at` is the next of them, counted from 0.

    Args:
        source: Where the records are.
        epoch: Which pass over them this is.
        cursor: Where to read from.
        share: The positions that are read; the others are stepped over.
        order: The order of the records; None for one shard as it lies.

    Raises:
        ResumeError: `cursor` is not a position of this source.
    """

    def __init__(
        self, source: IndexedSource, epoch: int, cursor: Cursor | None, share: Share = _WHOLE, order: Locate | None = None
    ) -> None:
        self._source = source
        self._sizes = source.shard_sizes
        self._num_records = int(np.sum(self._sizes, dtype=np.int64))
        self._left, self._offset, position = _begun(cursor)
        self._num_records -= self._offset
        if type(position) is not int or not 0 <= position <= self._num_records:
            raise cursor_error(source.shard_name(0), cursor, f"a position from 0 to {self._num_records}")
        self._position = position
        self._share = share
        assert order is not None or len(self._sizes) == 1, "IndexedOrder without a shuffle is the order of several shards as they lie"
        self._order = order
        self._piece = FIRST_PIECE if source.fetches_many else 1
        self._failure: BaseException | None = None
        self._closed = False
        source.start_epoch(epoch)

    def read(self, max_records: int) -> Span | None:
        """See `aioloader.protocols.Reader.read`."""
        if self._closed:
            raise ClosedError(f"source {self._source.shard_name(0)}: expected an open reader, got a closed one; open the source again.")
        if self._failure is not None:
            raise self._failure
        first = self._share.first_from(self._position)
        positions = range(first, self._num_records, self._share.count)[:max_records]
        if not positions:
            return None
        places = _Places(self._order, self._originals(positions))
        pulled = self._pull(places)
        num_read = len(pulled.records)
        if pulled.failure is not None:
            self._failure = source_error(pulled.failure, places.part(num_read, num_read + 1).ids(self._source)[0])
            if not num_read:
                raise self._failure
        before, self._position = self._position, min(positions[num_read - 1] + self._share.count, self._num_records)
        return Span(pulled.records, places.part(0, num_read).ids(self._source), self._position - before)

    def cursor(self) -> Cursor:
        """See `aioloader.protocols.Reader.cursor`."""
        if not self._left and not self._offset:
            return self._position
        left = self._left if self._position < len(self._left) else ()
        return {"left": list(left), "then": self._offset + len(left), "at": self._position}

    def _originals(self, positions: range) -> Sequence[int]:
        """Return where these positions are in the whole epoch."""
        num_left = len(self._left)
        if positions.start >= num_left:
            return range(positions.start + self._offset, positions.stop + self._offset, positions.step)
        return [self._left[at] if at < num_left else at + self._offset for at in positions]

    def close(self) -> None:
        """See `aioloader.protocols.Reader.close`."""
        self._closed = True

    def _pull(self, places: _Places) -> Pulled:
        """Read piece by piece until time is up; a piece that fails is read one by one, to find the record."""
        records: list[Record] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(records) < len(places) and (not records or time.monotonic() < deadline):
            part = places.part(len(records), min(len(records) + self._piece, len(places)))
            piece = self._timed_piece(part)
            if piece is None:
                singly = _pull_singly(self._source, part)
                return Pulled(records + singly.records, singly.failure)
            records.extend(piece)
        return Pulled(records)

    def _timed_piece(self, places: _Places) -> Sequence[Record] | None:
        """Return the records of one piece, or None where they could not be had; adapt the size of the next piece."""
        started = time.monotonic()
        try:
            piece = places.fetch(self._source)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - the reading one by one that follows raises it at its record
            return None
        if len(piece) != len(places):
            return None
        took_s = time.monotonic() - started
        if took_s > PATIENCE_S / 4:
            self._piece = max(1, self._piece // 2)
        elif len(places) == self._piece and (self._source.fetches_many or self._piece < FIRST_PIECE):
            self._piece *= 2
        return piece


def _begun(cursor: Any) -> tuple[Sequence[int], int, Any]:
    """Return the positions that come first, what to add to those that come after them, and where to begin."""
    match cursor:
        case None:
            return (), 0, 0
        case {"left": [*left], "then": int(then), "at": at, **rest} if (
            not rest and all(type(one) is int for one in left) and then >= len(left)
        ):
            return left, then - len(left), at
    return (), 0, cursor


def read_positions(source: IndexedSource, order: Locate | None, positions: Sequence[int]) -> tuple[Pulled, Sequence[RecordId]]:
    """Return the records at any positions of an order, up to one that fails, and the ids of all. Blocking.

    `order` is None for one shard as it lies.
    """
    places = _Places(order, positions)
    ids = places.ids(source)
    try:
        return Pulled(list(places.fetch(source))), ids
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the reading one by one that follows raises it at its record
        pulled = _pull_singly(source, places)
        if pulled.failure is None:
            return pulled, ids
        return Pulled(pulled.records, source_error(pulled.failure, ids[len(pulled.records)])), ids


def _pull_singly(source: IndexedSource, places: _Places) -> Pulled:
    records: list[Record] = []
    try:
        for at in range(len(places)):
            records.extend(places.part(at, at + 1).fetch(source))
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001 - settled by the caller, after the records before it
        return Pulled(records, failure=failure)
    return Pulled(records)


class _Places:
    """Where the records of some positions are. Those of a single shard in its own order stay a range, which sources can slice."""

    def __init__(self, order: Locate | None, positions: Sequence[int]) -> None:
        self._shards: NDArray[np.int64] | None = None
        self._rows: Any = positions
        if order is not None:
            self._shards, self._rows = order.locate(np.asarray(positions, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, first: int, last: int) -> _Places:
        """Return some of them."""
        part = object.__new__(_Places)
        part._rows = self._rows[first:last]
        part._shards = None if self._shards is None else self._shards[first:last]
        return part

    def ids(self, source: IndexedSource) -> Sequence[RecordId]:
        """Return the ids of the records."""
        if self._shards is None:
            name = source.shard_name(0)
            return RowIds(name, self._rows) if isinstance(self._rows, range) else [(name, row) for row in self._rows]
        names = {shard: source.shard_name(shard) for shard in np.unique(self._shards).tolist()}
        return [(names[shard], row) for shard, row in zip(self._shards.tolist(), self._rows.tolist(), strict=True)]

    def fetch(self, source: IndexedSource) -> Sequence[Record]:
        """Return the records, shard by shard."""
        if self._shards is None:
            return source.fetch(0, self._rows)
        shards = np.unique(self._shards).tolist()
        if len(shards) == 1:
            return source.fetch(shards[0], self._rows.tolist())
        records: list[Record] = [None] * len(self)
        for shard in shards:
            at = np.flatnonzero(self._shards == shard)
            for place, record in zip(at.tolist(), source.fetch(shard, self._rows[at].tolist()), strict=True):
                records[place] = record
        return records
