"""Readers of streams: thin shells around an iterator or async iterator; `StreamPlace` makes the decisions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

from aioloader.errors import ClosedError, ResumeError
from aioloader.protocols import Cursor, Json, Record, Span
from aioloader.sources.place import StreamPlace, checked_state
from aioloader.sources.pull import Pace, located, pull, pull_async, source_error

__all__ = ["AsyncStreamReader", "AsyncUpstream", "StreamReader", "Upstream"]

SKIP_RECORDS = 4096
"""Records dropped per pull while a reader walks to its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """A started iteration.

    Attributes:
        iterator: Gives the records.
        snapshot: Returns the state with which the record after the last one given comes first.
        close: Ends the iteration.
    """

    iterator: Iterator[Record]
    snapshot: Callable[[], Json] | None = None
    close: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncUpstream:
    """The same as `Upstream` for an asynchronous iteration."""

    iterator: AsyncIterator[Record]
    snapshot: Callable[[], Json] | None = None
    aclose: Callable[[], Awaitable[object]] | None = None


class StreamReader:
    """Reads an iteration; nothing is started before the first read.

    States of the upstream are taken only when a cursor is asked for, at most one for each span; between them records are counted.

    Args:
        name: The shard part of the record ids.
        begin: Starts an iteration at a state of the upstream, or at its beginning for None.
        cursor: Where to read from.

    Raises:
        ResumeError: `cursor` is not of a stream.
    """

    def __init__(self, name: str, begin: Callable[[Json | None], Upstream], cursor: Cursor | None) -> None:
        self._place = StreamPlace(name, cursor)
        self._begin = begin
        self._upstream: Upstream | None = None
        self._closed = False
        self._pace = Pace()

    def read(self, max_records: int) -> Span | None:
        """See `aioloader.protocols.Reader.read`."""
        _require_open(self._place, self._closed)
        if not self._place.is_live:
            self._place.finish()
            return None
        try:
            upstream = self._upstream or self._start()
            pulled = pull(upstream.iterator, self._pace.start(max_records, time.monotonic()))
        except BaseException as error:
            _break_off(self._place, error)
            raise
        self._pace.finish(len(pulled.records), time.monotonic())
        return self._place.settle(pulled)

    def cursor(self) -> Cursor:
        """See `aioloader.protocols.Reader.cursor`."""
        if self._upstream is not None:
            _take_snapshot(self._place, self._upstream.snapshot)
        return self._place.cursor()

    def close(self) -> None:
        """See `aioloader.protocols.Reader.close`."""
        upstream, self._upstream, self._closed = self._upstream, None, True
        if upstream is not None and upstream.close is not None:
            with located(self._place.record):
                upstream.close()

    def _start(self) -> Upstream:
        """Begin the iteration and walk to the place."""
        with located(self._place.record):
            self._upstream = self._begin(self._place.state)
        skipped = 0
        while skipped < self._place.skip:
            pulled = pull(self._upstream.iterator, min(SKIP_RECORDS, self._place.skip - skipped))
            skipped += len(pulled.records)
            if pulled.failure is not None:
                raise source_error(pulled.failure, _skipped_record(self._place, skipped))
            if pulled.ended:
                raise _too_short(self._place, skipped)
        return self._upstream


class AsyncStreamReader:
    """The same as `StreamReader` for an asynchronous iteration, under asyncio and trio.

    A cancelled read ends the iteration, as Python does with its generators: the cursor still names the next record, but this
    reader raises from then on.
    """

    def __init__(self, name: str, begin: Callable[[Json | None], AsyncUpstream], cursor: Cursor | None) -> None:
        self._place = StreamPlace(name, cursor)
        self._begin = begin
        self._upstream: AsyncUpstream | None = None
        self._closed = False
        self._pace = Pace()

    async def read(self, max_records: int) -> Span | None:
        """See `aioloader.protocols.Reader.read`."""
        _require_open(self._place, self._closed)
        if not self._place.is_live:
            self._place.finish()
            return None
        try:
            upstream = self._upstream or await self._start()
            pulled = await pull_async(upstream.iterator, self._pace.start(max_records, time.monotonic()))
        except BaseException as error:
            _break_off(self._place, error)
            raise
        self._pace.finish(len(pulled.records), time.monotonic())
        return self._place.settle(pulled)

    def cursor(self) -> Cursor:
        """See `aioloader.protocols.Reader.cursor`."""
        if self._upstream is not None:
            _take_snapshot(self._place, self._upstream.snapshot)
        return self._place.cursor()

    async def aclose(self) -> None:
        """See `aioloader.protocols.AsyncReader.aclose`."""
        upstream, self._upstream, self._closed = self._upstream, None, True
        if upstream is not None and upstream.aclose is not None:
            with located(self._place.record, Exception):
                await upstream.aclose()

    async def _start(self) -> AsyncUpstream:
        """Begin the iteration and walk to the place."""
        with located(self._place.record):
            self._upstream = self._begin(self._place.state)
        skipped = 0
        while skipped < self._place.skip:
            pulled = await pull_async(self._upstream.iterator, min(SKIP_RECORDS, self._place.skip - skipped))
            skipped += len(pulled.records)
            if pulled.failure is not None:
                raise source_error(pulled.failure, _skipped_record(self._place, skipped))
            if pulled.ended:
                raise _too_short(self._place, skipped)
        return self._upstream


def _require_open(place: StreamPlace, closed: bool) -> None:
    if closed:
        raise ClosedError(f"source {place.name}: expected an open reader, got a closed one; open the source again.")


def _break_off(place: StreamPlace, error: BaseException) -> None:
    """Keep an error for the reads to come; an interrupted read leaves none that may be raised twice."""
    if isinstance(error, Exception):
        place.failure = error
    else:
        place.interrupt()


def _take_snapshot(place: StreamPlace, snapshot: Callable[[], Json] | None) -> None:
    """Replace counted records by a state; not after a failure or the end, where the upstream may stand elsewhere."""
    if snapshot is None or not place.is_live or place.skip == 0:
        return
    with located(place.record):
        state = snapshot()
    place.remember(checked_state(place.name, state))


def _skipped_record(place: StreamPlace, skipped: int) -> tuple[str, int]:
    return (place.name, place.count - place.skip + skipped)


def _too_short(place: StreamPlace, skipped: int) -> ResumeError:
    return ResumeError(
        [(f"records of source {place.name}", f"at least {place.count}", place.count - place.skip + skipped)],
        do="resume with the data that the state was saved with",
    )
