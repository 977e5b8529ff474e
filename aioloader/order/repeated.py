"""An epoch filled up with records from its beginning, so that all lanes end together (`end="repeat"`)."""

from __future__ import annotations

from collections.abc import Mapping

from aioloader.errors import ResumeError
from aioloader.order.ordered import OrderedIndex
from aioloader.protocols import Cursor, Json, Share, Span
from aioloader.sources.indexed import IndexedReader

__all__ = ["RepeatedEpoch"]


class RepeatedEpoch:
    """The records of an indexed source in their order, and then those from its beginning again, up to a multiple of `block` records.

    Positions go on; the record at position p is that at p % `num_distinct`. The cursor is a position.

    Args:
        source: The records, at least one.
        block: Lanes times samples per micro-batch.
    """

    def __init__(self, source: OrderedIndex, block: int) -> None:
        self._source = source
        self.num_distinct = source.num_records
        self.num_records = -(-self.num_distinct // block) * block

    def fingerprint(self) -> Mapping[str, Json]:
        """Return that of the source."""
        return self._source.fingerprint()

    def open(self, epoch: int, cursor: Cursor | None) -> _Reader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`."""
        return self.open_share(epoch, cursor, Share())

    def open_share(self, epoch: int, cursor: Cursor | None, share: Share) -> _Reader:
        """Return a reader of one rank's share; see `aioloader.protocols.DealtSource.open_share`."""
        position = 0 if cursor is None else cursor
        if type(position) is not int or not 0 <= position <= self.num_records:
            raise ResumeError(
                [("cursor", cursor, f"a position from 0 to {self.num_records}")], do="pass the state that was saved with this source"
            )
        return _Reader(self, self._source, epoch, position, share)


class _Reader:
    """Reads lap after lap; in each, this rank's share begins somewhere else."""

    def __init__(self, repeated: RepeatedEpoch, source: OrderedIndex, epoch: int, position: int, share: Share) -> None:
        self._source = source
        self._epoch = epoch
        self._position = position
        self._share = share
        self._lap_size = repeated.num_distinct
        self._stop = repeated.num_records
        self._lap = -1
        self._reader: IndexedReader | None = None

    def read(self, max_records: int) -> Span | None:
        """See `aioloader.protocols.Reader.read`."""
        before = self._position
        while (num_left := len(range(self._share.first_from(self._position), self._stop, self._share.count))) > 0:
            reader = self._open()
            span = reader.read(min(max_records, num_left))
            if span is not None:
                self._position = min(self._lap * self._lap_size + reader.cursor(), self._stop)
                return Span(span.records, span.ids, self._position - before)
            self._position = (self._lap + 1) * self._lap_size
        return None

    def cursor(self) -> Cursor:
        """See `aioloader.protocols.Reader.cursor`."""
        return self._position

    def close(self) -> None:
        """See `aioloader.protocols.Reader.close`."""
        if self._reader is not None:
            self._reader.close()

    def _open(self) -> IndexedReader:
        """Return the reader of the lap of the position."""
        lap, at = divmod(self._position, self._lap_size)
        if self._reader is None or lap != self._lap:
            self.close()
            index = (self._share.index - lap * self._lap_size) % self._share.count
            self._lap, self._reader = lap, self._source.open_share(self._epoch, at, Share(index, self._share.count))
        return self._reader
