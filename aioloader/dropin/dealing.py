"""Which records of a stream a data-parallel rank gets, and which of these a worker process of the DataLoader around us."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from aioloader.dropin.outer_worker import hidden_outer_worker
from aioloader.errors import ConfigError, ResumeError
from aioloader.order.already_sharded import AlreadySharded
from aioloader.order.ordered import OrderedIndex, order_source
from aioloader.protocols import Cursor, Json, Reader, Share, Source, Span
from aioloader.sources import AsyncIterableSource, resolve_source
from aioloader.sources.pull import PATIENCE_S
from aioloader.sources.reading import open_share

__all__ = ["Dealing", "DealtRecords", "as_source", "is_indexed", "part_of_rank", "part_of_worker", "size_of"]


_MAX_FOREIGN = 16
"""Records of others that are read at once: they are let go right away, but may be large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """A part of a stream.

    1. Rank `dp_rank` of `dp_size` gets record i if i % dp_size == dp_rank; the `limit` is where its stream ends, None: with the data.
    2. Worker `worker` of `num_workers` gets record j of the rank if j // block % num_workers == worker.
    """

    dp_rank: int = 0
    dp_size: int = 1
    limit: int | None = None
    worker: int = 0
    num_workers: int = 1
    block: int = 1

    @property
    def share(self) -> Share:
        """Return the positions to read. With blocks of one, those of the worker are as regular as those of the rank."""
        if self.block > 1:
            return Share(self.dp_rank, self.dp_size)
        return Share(self.dp_rank + self.dp_size * self.worker, self.dp_size * self.num_workers)

    def positions(self, position: int, end: int) -> range:
        """Return those from `position` on and before `end` that are in the share."""
        share = self.share
        return range(share.first_from(position), end if self.limit is None else min(end, self.limit), share.count)

    def keeps(self, position: int) -> bool:
        """Return whether a position of the share is the worker's."""
        if self.block == 1:
            return True
        return position // self.dp_size // self.block % self.num_workers == self.worker

    def fingerprint(self) -> dict[str, Json]:
        """Return what decides which records these are."""
        return {
            "dp": [self.dp_rank, self.dp_size],
            "limit": self.limit,
            "worker": [self.worker, self.num_workers, self.block],
        }


class DealtRecords:
    """The records of a part of a source, one position each, under the ids that they have in the source."""

    def __init__(self, source: Source, dealing: Dealing) -> None:
        self.source = source
        self.dealing = dealing

    def for_worker(self, worker: int, num_workers: int, block: int) -> DealtRecords:
        """Return the part of one worker of these records."""
        return DealtRecords(self.source, replace(self.dealing, worker=worker, num_workers=num_workers, block=block))

    def fingerprint(self) -> Mapping[str, Json]:
        """Return that of the source, and of the part."""
        return {"kind": "dealt", "source": dict(self.source.fingerprint()), **self.dealing.fingerprint()}

    def open(self, epoch: int, cursor: Cursor | None) -> Reader:
        """Return a reader of this part; see `aioloader.protocols.Source.open`."""
        return _DealtReader(self.source, self.dealing, epoch, cursor)


class _DealtReader:
    """Reads the part with a reader of the share where the source has one, else leaves out what is not in it."""

    def __init__(self, source: Source, dealing: Dealing, epoch: int, cursor: Cursor | None) -> None:
        self._dealing = dealing
        self._position, inner = _begun(cursor)
        with hidden_outer_worker():
            self._reader: Any = open_share(source, epoch, inner, dealing.share)
        if inspect.iscoroutinefunction(self._reader.read):
            raise _asynchronous("dataset", type(source).__qualname__)
        self._is_dealt = hasattr(source, "open_share")
        self._clock: Callable[[], float] = time.monotonic

    def read(self, max_records: int) -> Span | None:
        """Return the next records of the part; none, with nothing passed, if others had many before them."""
        deadline = self._clock() + PATIENCE_S
        while self._dealing.limit is None or self._position < self._dealing.limit:
            with hidden_outer_worker():
                span = self._reader.read(self._num_to_read(max_records))
            if span is None:
                return None
            own = self._own(span)
            if own.records or self._clock() >= deadline:
                return own
        return None

    def cursor(self) -> Cursor | None:
        """Return the cursor of the next record, None if the source has none."""
        with hidden_outer_worker():
            inner = self._reader.cursor()
        return None if inner is None else {"position": self._position, "cursor": inner}

    def close(self) -> None:
        """Close the reader of the source."""
        with hidden_outer_worker():
            self._reader.close()

    def _num_to_read(self, max_records: int) -> int:
        """Return how many records to read for at most `max_records` of the part, holding few of others meanwhile."""
        if self._is_dealt:
            return max_records
        share = self._dealing.share
        through = share.first_from(self._position) - self._position + 1 + share.count * (max_records - 1)
        return min(through, max(max_records, _MAX_FOREIGN))

    def _own(self, span: Span) -> Span:
        """Return the records of a span that are in the part."""
        dealing, first = self._dealing, self._position
        self._position += span.num_positions
        positions = dealing.positions(first, self._position)
        start, step = (0, 1) if self._is_dealt else (positions.start - first, positions.step)
        numbers = [start + step * at for at, position in enumerate(positions) if dealing.keeps(position)]
        if len(numbers) == len(span.records):
            return Span(span.records, span.ids)
        return Span([span.records[number] for number in numbers], [span.ids[number] for number in numbers])


def _begun(cursor: Cursor | None) -> tuple[int, Cursor | None]:
    match cursor:
        case None:
            return 0, None
        case {"position": int(position), "cursor": inner, **rest} if not rest and position >= 0:
            return position, inner
    raise ResumeError(
        [("cursor", cursor, "position and cursor of dealt records")], do="load the state into the dataset that it was saved from"
    )


@runtime_checkable
class _OneToOne(Protocol):
    """Makes one record of each of its source: the part of what it makes is what it makes of the part."""

    source: Source
    is_one_to_one: bool

    def over(self, source: Source) -> Source:
        """Return the same of another source."""


def part_of_rank(source: Source, dp_rank: int, dp_size: int, limit: int | None) -> Source:
    """Return the records of one data-parallel rank."""
    if isinstance(source, _OneToOne) and source.is_one_to_one:
        return source.over(part_of_rank(source.source, dp_rank, dp_size, limit))
    return DealtRecords(source, Dealing(dp_rank=dp_rank, dp_size=dp_size, limit=limit))


def part_of_worker(source: Source, worker: int, num_workers: int, block: int) -> Source:
    """Return the records of one DataLoader worker, in blocks of so many."""
    if isinstance(source, DealtRecords):
        return source.for_worker(worker, num_workers, block)
    if isinstance(source, _OneToOne) and source.is_one_to_one:
        return source.over(part_of_worker(source.source, worker, num_workers, block))
    return DealtRecords(source, Dealing(worker=worker, num_workers=num_workers, block=block))


def is_indexed(source: Any) -> bool:
    """Return whether the records of a source, or those that it makes others of, can be had by index."""
    while not isinstance(source, OrderedIndex):
        if not isinstance(source, DealtRecords | _OneToOne):
            return False
        source = source.source
    return True


def size_of(dataset: Any, source: Source) -> int | None:
    """Return the number of records of a dataset, None if it does not say."""
    while isinstance(source, _OneToOne) and source.is_one_to_one:
        source = source.source
    if isinstance(source, OrderedIndex):
        return source.num_records
    try:
        return len(dataset)
    except TypeError:
        return None


def as_source(where: str, dataset: Any) -> Source:
    """Return the source that reads a dataset, also one of ours, whose records come in its order.

    Raises:
        ConfigError: It is nothing that can be read record by record.
    """
    if isinstance(dataset, AlreadySharded):
        return as_source(where, dataset.source)
    own = getattr(dataset, "record_source", None)
    if own is not None:
        return own()  # type: ignore[no-any-return]
    source = resolve_source(dataset)
    if isinstance(source, AsyncIterableSource):
        raise _asynchronous(where, "an async iterable")
    return order_source(source, None, seed=0)


def _asynchronous(where: str, got: str) -> ConfigError:
    return ConfigError(where, expected="a dataset for `for` loops", got=f"{got}, which is asynchronous", do="give it to aioloader.Loader")
