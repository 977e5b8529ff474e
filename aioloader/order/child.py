"""The sources of a mixture, each read at its own pace: streams one after another, indexed sources by position."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aioloader.errors import ResumeError
from aioloader.order.ordered import OrderedIndex
from aioloader.protocols import Cursor, Record, RecordId, Share, Source
from aioloader.runtime.threads import CallThread
from aioloader.sources.indexed import read_positions
from aioloader.sources.pull import Pulled
from aioloader.sources.reading import Reading

__all__ = ["Child", "IndexedChild", "StreamChild"]

_READ_AHEAD = 64

Row = tuple[Record, RecordId]


class Child(Protocol):
    """One source of a mixture. Ids of its records are (name / shard, row).

    Attributes:
        name: Its name there.
    """

    name: str

    @property
    def has_ended(self) -> bool:
        """Return whether its pass has no records but those that are ready."""

    @property
    def is_empty(self) -> bool:
        """Return whether its pass had no records at all."""

    async def fill(self, wanted: Sequence[bool]) -> int:
        """Make the next records ready, at least those that are wanted.

        Return how many of them are: fewer at the end of the pass, before a failure, or while they come slowly.
        """

    async def take(self, wanted: Sequence[bool]) -> list[Row]:
        """Step over the next records, which are ready, and return those that are wanted."""

    def check(self) -> None:
        """Raise what keeps the next record from being read, if anything does."""

    async def restart(self) -> None:
        """Go back to the first record, for another pass."""

    def cursor(self) -> Cursor:
        """Return the cursor of the next record."""

    async def aclose(self) -> None:
        """Release what is open."""


class StreamChild:
    """A source that is read through. The cursor is the reader's before a read, and how many records after it were taken.

    Args:
        name: Its name in the mixture.
        source: What to read.
        epoch: The epoch of its first pass here; each further pass is one more.
        cursor: Where to stand in it.
    """

    def __init__(self, name: str, source: Source, epoch: int, cursor: Cursor | None) -> None:
        self.name = name
        self._has_ended = False
        self._source = source
        self._epoch = epoch
        self._reading: Reading | None = None
        self._ready: deque[Row] = deque()
        self._failure: BaseException | None = None
        self._begin(*_checked(name, cursor, "at", "taken"))

    @property
    def has_ended(self) -> bool:
        """See `Child`."""
        return self._has_ended

    @property
    def is_empty(self) -> bool:
        """See `Child`."""
        return self._has_ended and not self._num_taken and not self._ready

    async def fill(self, wanted: Sequence[bool]) -> int:
        """See `Child`. Reads no more than once where something is there."""
        num_records = len(wanted)
        while len(self._ready) < num_records and not self._has_ended and self._failure is None:
            try:
                await self._read(max(num_records - len(self._ready), _READ_AHEAD))
            except Exception as failure:  # noqa: BLE001 - raised in its place
                self._failure = failure
            if self._ready:
                break
        return min(len(self._ready), num_records)

    async def take(self, wanted: Sequence[bool]) -> list[Row]:
        """See `Child`."""
        self._num_taken += len(wanted)
        while len(self._reads) > 1 and self._reads[1][1] <= self._num_taken:
            self._reads.popleft()
        taken = [self._ready.popleft() for _ in wanted]
        return [row for row, is_wanted in zip(taken, wanted, strict=True) if is_wanted]

    def check(self) -> None:
        """See `Child`."""
        if self._failure is not None:
            raise self._failure

    async def restart(self) -> None:
        """See `Child`."""
        await self.aclose()
        self._epoch += 1
        self._has_ended = False
        self._begin(None, 0)

    def cursor(self) -> Cursor:
        """See `Child`."""
        at, before = self._reads[0]
        return {"at": at, "taken": self._num_taken - before}

    async def aclose(self) -> None:
        """See `Child`."""
        if self._reading is not None:
            reading, self._reading = self._reading, None
            await reading.close()

    def _begin(self, at: Cursor | None, num_taken: int) -> None:
        self._reads: deque[tuple[Cursor | None, int]] = deque([(at, 0)])
        """The cursor before each read, and the records between the first one and it."""
        self._num_read = 0
        self._num_taken = self._num_to_skip = num_taken

    async def _read(self, max_records: int) -> None:
        if self._reading is None:
            self._reading = await Reading.open(self._source, self._epoch, self._reads[0][0], Share())
        at, span = await self._reading.read(max_records)
        if span is None:
            self._has_ended = True
            return
        if at is not None and self._num_read:
            self._reads.append((at, self._num_read))
        self._num_read += len(span.records)
        skipped = min(self._num_to_skip, len(span.records))  # taken before the state was saved
        self._num_to_skip -= skipped
        rows = zip(span.records[skipped:], span.ids[skipped:], strict=True)
        self._ready.extend((record, (f"{self.name}/{shard}", row)) for record, (shard, row) in rows)


class IndexedChild:
    """A source whose wanted records alone are fetched. The cursor is the position of the next one. Arguments as for `StreamChild`."""

    def __init__(self, name: str, source: OrderedIndex, epoch: int, cursor: Cursor | None) -> None:
        self.name = name
        self._source = source
        self._epoch = epoch
        self._position: int = _checked(name, cursor, "position")[0]
        self._num_records: int = source.num_records
        self._order = source.order(epoch)
        self._ready: dict[int, Row] = {}
        self._failed: tuple[int, BaseException] | None = None
        self._thread: CallThread | None = None
        self._has_begun = False

    @property
    def has_ended(self) -> bool:
        """See `Child`."""
        return self._position >= self._num_records

    @property
    def is_empty(self) -> bool:
        """See `Child`."""
        return not self._num_records

    async def fill(self, wanted: Sequence[bool]) -> int:
        """See `Child`."""
        stop = min(self._position + len(wanted), self._num_records)
        missing = [
            position
            for position, is_wanted in zip(range(self._position, stop), wanted, strict=False)
            if is_wanted and position not in self._ready
        ]
        if missing and self._failed is None:
            self._thread = self._thread or CallThread(f"aioloader-{self.name}")
            pulled, ids = await self._thread.call(self._fetch, missing)
            for position, record, (shard, row) in zip(missing, pulled.records, ids, strict=False):
                self._ready[position] = record, (f"{self.name}/{shard}", row)
            if pulled.failure is not None:
                self._failed = missing[len(pulled.records)], pulled.failure
        if self._failed is not None:
            stop = min(stop, self._failed[0])
        return stop - self._position

    async def take(self, wanted: Sequence[bool]) -> list[Row]:
        """See `Child`."""
        rows = [self._ready.pop(position, None) for position in range(self._position, self._position + len(wanted))]
        self._position += len(wanted)
        return [row for row, is_wanted in zip(rows, wanted, strict=True) if is_wanted and row is not None]

    def check(self) -> None:
        """See `Child`."""
        if self._failed is not None and self._failed[0] == self._position:
            raise self._failed[1]

    async def restart(self) -> None:
        """See `Child`."""
        self._epoch += 1
        self._order = self._source.order(self._epoch)
        self._position, self._has_begun = 0, False
        self._ready.clear()

    def cursor(self) -> Cursor:
        """See `Child`."""
        return {"position": self._position}

    async def aclose(self) -> None:
        """See `Child`."""
        if self._thread is not None:
            self._thread.stop()

    def _fetch(self, positions: list[int]) -> tuple[Pulled, Sequence[RecordId]]:
        if not self._has_begun:
            self._has_begun = True
            self._source.source.start_epoch(self._epoch)
        return read_positions(self._source.source, self._order, positions)


def _checked(name: str, cursor: Cursor | None, *keys: str) -> list[Any]:
    """Return the parts of a child's cursor."""
    if cursor is None:
        return [None if key == "at" else 0 for key in keys]
    if not isinstance(cursor, Mapping) or sorted(cursor) != sorted(keys):
        difference = (f"cursor of source {name!r} of the mixture", cursor, " and ".join(keys))
        raise ResumeError([difference], do="load the state into a loader of the same mixture")
    return [cursor[key] for key in keys]
