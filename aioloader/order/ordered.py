"""A source in the order that the loader asks for: indexed ones by arithmetic, streams window by window."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import numpy as np

from aioloader.order.indexed import IndexedOrder
from aioloader.order.shuffle import Shuffle
from aioloader.order.window import WindowOrder
from aioloader.order.windowed import AsyncWindowedReader, WindowedReader, check_cursor
from aioloader.protocols import AsyncReader, Cursor, IndexedSource, Json, Reader, Share, Source
from aioloader.sources.indexed import IndexedReader, Locate

__all__ = ["OrderedIndex", "ShuffledStream", "order_source"]


def order_source(source: Source, shuffle: Shuffle | None, seed: int, purpose: str = "records") -> Source:
    """Return the source whose stream is the order of the records; `purpose` keeps apart sources that are shuffled with one seed."""
    if isinstance(source, IndexedSource):
        return OrderedIndex(source, shuffle, seed, purpose)
    return source if shuffle is None else ShuffledStream(source, shuffle, seed, purpose)


class OrderedIndex:
    """An indexed source as a stream of its records, which can be read one rank's share at a time. The cursor is a position."""

    def __init__(self, source: IndexedSource, shuffle: Shuffle | None, seed: int, purpose: str = "records") -> None:
        self.source = source
        self._shuffle = shuffle
        self._seed = seed
        self._purpose = purpose

    @property
    def num_records(self) -> int:
        """Return the number of records of one epoch."""
        return int(np.sum(self.source.shard_sizes, dtype=np.int64))

    def fingerprint(self) -> Mapping[str, Json]:
        """Return that of the source."""
        return self.source.fingerprint()

    def order(self, epoch: int) -> Locate | None:
        """Return which record comes when; None if there is one shard and nothing is shuffled: row by row."""
        if self._shuffle is None and len(self.source.shard_sizes) == 1:
            return None
        return IndexedOrder(self.source.shard_sizes, self._shuffle, self._seed, epoch, purpose=self._purpose)

    def open(self, epoch: int, cursor: Cursor | None) -> IndexedReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`."""
        return self.open_share(epoch, cursor, Share())

    def open_share(self, epoch: int, cursor: Cursor | None, share: Share) -> IndexedReader:
        """Return a reader of one rank's share; see `aioloader.protocols.DealtSource.open_share`."""
        return IndexedReader(self.source, epoch, cursor, share, self.order(epoch))


class ShuffledStream:
    """A stream whose records are permuted inside windows. Holds up to two windows of records, outside of the loader's memory limit.

    The cursor is that of the source at the start of a window, with an offset: resuming reads at most one window again.
    """

    def __init__(self, source: Source, shuffle: Shuffle, seed: int, purpose: str = "records") -> None:
        self._source = source
        self._shuffle = shuffle
        self._seed = seed
        self._purpose = purpose

    def fingerprint(self) -> Mapping[str, Json]:
        """Return that of the source."""
        return self._source.fingerprint()

    def open(self, epoch: int, cursor: Cursor | None) -> Reader | AsyncReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`."""
        inner = check_cursor(cursor, self._shuffle)
        reader = self._source.open(epoch, inner)
        order = WindowOrder(self._shuffle, self._seed, epoch, self._purpose)
        if inspect.iscoroutinefunction(reader.read):
            return AsyncWindowedReader(reader, order, cursor)  # type: ignore[arg-type]
        return WindowedReader(reader, order, cursor)  # type: ignore[arg-type]
