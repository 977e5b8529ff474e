"""Readers of a shuffled stream: while one window is handed out, the next one is read at the same pace.

    upstream    ... | r8 r9 r10 .  |        the window being read
    handed out      | r5 r4 r7 r6  |        the window before it, in its order

`Windows` makes every decision; the two readers only wait for their upstream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aioloader.errors import ClosedError, ResumeError
from aioloader.order.shuffle import Shuffle
from aioloader.order.window import WindowOrder
from aioloader.protocols import AsyncReader, Cursor, Reader, Record, RecordId, Span

__all__ = ["AsyncWindowedReader", "WindowedReader", "Windows", "check_cursor"]


@dataclass(slots=True)
class _Window:
    """The records of a window in the order of the upstream, whose cursor before the first of them is `start`."""

    number: int
    start: Cursor | None
    records: list[Record] = field(default_factory=list)
    ids: list[RecordId] = field(default_factory=list)


class Windows:
    """Which records to read next, and which to hand out. Pure.

    Args:
        order: The permutation of each window.
        cursor: Where to begin: a window, the cursor of the upstream at its start, and how many of its records were handed out.
    """

    def __init__(self, order: WindowOrder, cursor: Cursor | None) -> None:
        self._order = order
        self._size = order.shuffle.window
        number, start, offset = (0, None, 0) if cursor is None else (cursor["window"], cursor["start"], cursor["offset"])
        self._filling = _Window(number, start)
        self._is_begun = cursor is not None
        self._skip = offset
        self._ready: tuple[Sequence[Record], Sequence[RecordId]] = ((), ())
        self._ready_window = _Window(number, start)
        self._offset = 0
        self._has_ended = False
        self.failure: BaseException | None = None
        """What ended the upstream; raised once all windows read before it are handed out."""

    @property
    def num_ready(self) -> int:
        """Return the records that can be handed out."""
        return len(self._ready[0]) - self._offset

    @property
    def is_at_border(self) -> bool:
        """Return whether the next record read is the first of a window: `begin` is called before it."""
        return not self._is_begun

    def begin(self, start: Cursor | None) -> None:
        """Note the cursor of the upstream at the start of a window."""
        self._filling.start = start
        self._is_begun = True

    def wanted(self, max_records: int) -> int:
        """Return how many records to read now: as many as are handed out, or all that a window lacks where nothing is ready."""
        if self._has_ended or self.failure is not None:
            return 0
        missing = self._size - len(self._filling.records)
        return min(missing, max_records) if self.num_ready else missing

    def feed(self, span: Span | None) -> None:
        """Take what was read; None is the end of the upstream."""
        if span is None:
            self._has_ended = True
        else:
            self._filling.records.extend(span.records)
            self._filling.ids.extend(span.ids)

    def take(self, max_records: int) -> Span | None:
        """Return records of the window that is ready, None at the end."""
        if not self.num_ready:
            self._turn()
        if not self.num_ready:
            if self.failure is not None:
                raise self.failure
            return None
        part = slice(self._offset, self._offset + max_records)
        records, ids = self._ready[0][part], self._ready[1][part]
        self._offset += len(records)
        return Span(records, ids)

    def cursor(self, upstream: Cursor | None) -> Cursor | None:
        """Return the cursor of the next record; `upstream` is that of the reader below, now."""
        if self.num_ready:
            window, offset = self._ready_window, self._offset
        else:
            window, offset = self._filling, self._skip
        start = window.start if window is not self._filling or self._is_begun else upstream
        return None if start is None else {"window": window.number, "start": start, "offset": offset}

    def close(self) -> None:
        """Let go of the records; nothing can be read any more."""
        self.failure = ClosedError("shuffled stream: expected an open reader, got a closed one; open the source again.")
        self._ready, self._offset = ((), ()), 0

    def _turn(self) -> None:
        """Make the window that was read the one that is handed out, if it is complete."""
        window = self._filling
        is_complete = len(window.records) == self._size or (self._has_ended and window.records)
        if not is_complete:  # after a failure: its order is not known, and resuming reads it as a whole
            return
        if self._skip > len(window.records):
            difference = (f"records in window {window.number} of the shuffled stream", f">= {self._skip}", str(len(window.records)))
            raise ResumeError([difference], do="resume with the data that the state was saved with")
        chosen = self._order.permutation(window.number, len(window.records)).tolist()
        self._ready = [window.records[at] for at in chosen], [window.ids[at] for at in chosen]
        self._ready_window = _Window(window.number, window.start)
        self._offset, self._skip = self._skip, 0
        self._filling, self._is_begun = _Window(window.number + 1, None), False


class WindowedReader:
    """The reader over a blocking one."""

    def __init__(self, reader: Reader, order: WindowOrder, cursor: Cursor | None) -> None:
        self._reader = reader
        self._windows = Windows(order, cursor)

    def read(self, max_records: int) -> Span | None:
        """See `aioloader.protocols.Reader.read`. The first call of a window waits for all of it."""
        windows = self._windows
        while wanted := windows.wanted(max_records):
            if windows.is_at_border:
                windows.begin(self._reader.cursor())
            try:
                windows.feed(self._reader.read(wanted))
            except Exception as failure:  # noqa: BLE001 - raised in its place
                windows.failure = failure
            if windows.num_ready:
                break
        return windows.take(max_records)

    def cursor(self) -> Cursor | None:
        """See `aioloader.protocols.Reader.cursor`."""
        return self._windows.cursor(self._reader.cursor())

    def close(self) -> None:
        """See `aioloader.protocols.Reader.close`."""
        self._windows.close()
        self._reader.close()


class AsyncWindowedReader:
    """The same over an asynchronous one."""

    def __init__(self, reader: AsyncReader, order: WindowOrder, cursor: Cursor | None) -> None:
        self._reader = reader
        self._windows = Windows(order, cursor)

    async def read(self, max_records: int) -> Span | None:
        """See `aioloader.protocols.Reader.read`. The first call of a window waits for all of it."""
        windows = self._windows
        while wanted := windows.wanted(max_records):
            if windows.is_at_border:
                windows.begin(self._reader.cursor())
            try:
                windows.feed(await self._reader.read(wanted))
            except Exception as failure:  # noqa: BLE001 - raised in its place
                windows.failure = failure
            if windows.num_ready:
                break
        return windows.take(max_records)

    def cursor(self) -> Cursor | None:
        """See `aioloader.protocols.AsyncReader.cursor`."""
        return self._windows.cursor(self._reader.cursor())

    async def aclose(self) -> None:
        """See `aioloader.protocols.AsyncReader.aclose`."""
        self._windows.close()
        await self._reader.aclose()


def check_cursor(cursor: Any, shuffle: Shuffle) -> Cursor | None:
    """Return the upstream's part of a cursor.

    Raises:
        ResumeError: It is not one of a stream that is shuffled in windows of this size.
    """
    match cursor:
        case None:
            return None
        case {"window": int(window), "start": start, "offset": int(offset), **rest} if (
            not rest and 0 <= offset < shuffle.window and window >= 0
        ):
            return start
    raise ResumeError(
        [("cursor of a shuffled stream", cursor, f"window, start and an offset below {shuffle.window}")],
        do="load the state into a loader of the same source and shuffle",
    )
