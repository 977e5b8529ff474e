"""The first records of a source."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from aioloader.protocols import AsyncReader, Cursor, Json, Reader, Source, Span
from aioloader.sources.place import cursor_error

__all__ = ["FirstRecords"]


class FirstRecords:
    """The first `num_records` records of a stream; the cursor is {"left", "inner"}: how many are left, and that of the stream."""

    def __init__(self, source: Source, num_records: int) -> None:
        self._source = source
        self._num_records = num_records

    def __repr__(self) -> str:
        return f"FirstRecords({self._source!r}, {self._num_records})"

    def fingerprint(self) -> Mapping[str, Json]:
        """Return that of the stream, and the number."""
        return {**self._source.fingerprint(), "first_records": self._num_records}

    def open(self, epoch: int, cursor: Cursor | None) -> Reader | AsyncReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`.

        Raises:
            ResumeError: The cursor is not of these records.
        """
        left, inner = self._num_records, None
        if cursor is not None:
            match cursor:
                case {"left": left, "inner": inner, **rest} if not rest and type(left) is int and 0 <= left <= self._num_records:
                    pass
                case _:
                    raise cursor_error(repr(self), cursor, f"a number of records left, up to {self._num_records}, and a cursor")
        reader: Any = self._source.open(epoch, inner)
        return _AsyncFirstReader(reader, left) if inspect.iscoroutinefunction(reader.read) else _FirstReader(reader, left)


class _FirstReader:
    def __init__(self, reader: Reader, left: int) -> None:
        self._reader = reader
        self._left = left
        self._closed = False

    def read(self, max_records: int) -> Span | None:
        if not self._left and not self._closed:
            return None
        span = self._reader.read(min(max_records, self._left or 1))  # a closed reader says so itself
        self._left -= len(span.records) if span is not None else 0
        return span

    def cursor(self) -> Cursor | None:
        return _cursor(self._reader, self._left)

    def close(self) -> None:
        self._closed = True
        self._reader.close()


class _AsyncFirstReader:
    def __init__(self, reader: AsyncReader, left: int) -> None:
        self._reader = reader
        self._left = left
        self._closed = False

    async def read(self, max_records: int) -> Span | None:
        if not self._left and not self._closed:
            return None
        span = await self._reader.read(min(max_records, self._left or 1))
        self._left -= len(span.records) if span is not None else 0
        return span

    def cursor(self) -> Cursor | None:
        return _cursor(self._reader, self._left)

    async def aclose(self) -> None:
        self._closed = True
        await self._reader.aclose()


def _cursor(reader: Reader | AsyncReader, left: int) -> Cursor | None:
    inner = reader.cursor()
    return None if inner is None else {"left": left, "inner": inner}
