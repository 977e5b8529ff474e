"""What every source must do, as one function; the cases are in the tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from aioloader.errors import ClosedError, ResumeError
from aioloader.protocols import AsyncReader, Cursor, Json, Reader, Record, RecordId, Source, Span

Read = list[tuple[RecordId, Record]]


async def read_span(reader: Reader | AsyncReader, max_records: int) -> Span | None:
    span = reader.read(max_records)
    return span if span is None or isinstance(span, Span) else await span


async def close(reader: Reader | AsyncReader) -> None:
    if hasattr(reader, "aclose"):
        await reader.aclose()
    else:
        reader.close()


async def read_all(source: Source, *, epoch: int = 0, cursor: Cursor | None = None, sizes: Sequence[int] = (7,)) -> Read:
    """Return all records with their ids, asking for `sizes` in turn; check every span on the way."""
    reader = source.open(epoch, cursor)
    found: Read = []
    turn = 0
    while (span := await read_span(reader, sizes[turn % len(sizes)])) is not None:
        assert 1 <= len(span.records) == len(span.ids) <= sizes[turn % len(sizes)]
        found.extend(zip(span.ids, span.records, strict=True))
        turn += 1
    assert await read_span(reader, 1) is None
    await close(reader)
    return found


async def read_with_cursors(source: Source, *, epoch: int = 0, size: int = 1) -> tuple[Read, list[tuple[int, Cursor]]]:
    """Return all records, and the cursors on the way with the number of records before each."""
    reader = source.open(epoch, None)
    found: Read = []
    cursors = [(0, reader.cursor())]
    while (span := await read_span(reader, size)) is not None:
        found.extend(zip(span.ids, span.records, strict=True))
        cursors.append((len(found), reader.cursor()))
    cursors.append((len(found), reader.cursor()))
    await close(reader)
    return found, cursors


def same(left: Any, right: Any) -> bool:
    """Return whether records are equal; arrays have no truth value, but a representation."""
    return repr(left) == repr(right)


def through_json(cursor: Cursor) -> Json:
    return json.loads(json.dumps(cursor))


async def check_source(source: Source, expected: Sequence[Record], *, other: Source | None = None, sizes: Sequence[int] = (1, 3)) -> None:
    """Fail unless `source`, and `other` made in the same way, keep the whole contract for these records."""
    other = other or source
    full = await read_all(source)
    assert same([record for _, record in full], list(expected))
    assert len({record_id for record_id, _ in full}) == len(full)
    assert same(await read_all(other), full)
    assert source.fingerprint() == other.fingerprint() == json.loads(json.dumps(source.fingerprint()))
    for size in sizes:
        found, cursors = await read_with_cursors(source, size=size)
        assert same(found, full)
        for before, cursor in cursors:
            assert through_json(cursor) == cursor
            assert same(await read_all(other, cursor=through_json(cursor), sizes=(5, 2)), full[before:]), (before, cursor)
    await check_closing(source)


async def check_closing(source: Source) -> None:
    reader = source.open(0, None)
    await read_span(reader, 2)
    await close(reader)
    await close(reader)
    with pytest.raises(ClosedError, match="expected an open reader"):
        await read_span(reader, 1)
    untouched = source.open(0, None)
    await close(untouched)


async def check_foreign_cursors(source: Source) -> None:
    for cursor in ([1, 2], {"count": -1}, "there", -1, 10**9, [0, 10**9, 0], [True], {"count": 1, "state": None, "skip": 2, "end": False}):
        with pytest.raises(ResumeError, match="does not belong to this loader"):
            source.open(0, cursor)


async def check_failure(source: Source, *, before: Sequence[Record], match: str, kind: type[BaseException]) -> BaseException:
    """Fail unless everything before the failure is delivered for all span sizes, and the failure stays. Return the failure."""
    failure: BaseException | None = None
    for size in (1, 2, 100):
        reader = source.open(0, None)
        found: list[Record] = []
        with pytest.raises(kind, match=match) as caught:  # noqa: PT012
            while (span := await read_span(reader, size)) is not None:
                found.extend(span.records)
        assert same(found, list(before))
        with pytest.raises(kind, match=match):
            await read_span(reader, 1)
        assert through_json(reader.cursor()) == reader.cursor()
        failure = caught.value
        await close(reader)
    assert failure is not None
    return failure


def run(awaitable: Any) -> Any:
    """Run a coroutine to its end, for tests that make their examples many times."""
    return asyncio.run(awaitable)
