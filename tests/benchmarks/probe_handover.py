"""How long it takes to get a batch that is ready: the consumer sleeps, so that several are, and asks for some in a row.

The first of them says what it takes in a process that has slept, with cold caches; the others what it takes in a loop.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from tests.benchmarks.contestants import Feed
from tests.benchmarks.digest import Digest
from tests.benchmarks.task import Measurement

__all__ = ["measure", "measure_async"]

_PAUSE_S = 0.02
_IN_A_ROW = 3  # every contestant keeps at least four ahead
_WARM_UP = 8  # pauses


def measure(feed: Feed, digest: Digest) -> Measurement:
    """Time `next`."""
    handovers = _Handovers(digest)
    with feed as batches:
        for row in _timed(iter(batches)):
            handovers.add(row)
    return handovers.measurement()


def measure_async(feed: Feed, digest: Digest) -> Measurement:
    """Time `anext`, and for a loader that has none, `next` in a thread: what an asyncio program does with it."""
    handovers = _Handovers(digest)

    async def take_all(batches: Any) -> None:
        async for row in _timed_async(_async(batches)):
            handovers.add(row)

    with feed as batches:
        asyncio.run(take_all(batches))
    return handovers.measurement()


_Row = list[tuple[float, Any]]
"""Seconds that it took to get each batch of a row, and the batch."""


def _timed(iterator: Iterator[Any]) -> Iterator[_Row]:
    while True:
        time.sleep(_PAUSE_S)
        row: _Row = []
        for _ in range(_IN_A_ROW):
            started = time.perf_counter()
            batch = next(iterator, None)
            row.append((time.perf_counter() - started, batch))
            if batch is None:
                yield row[:-1]
                return
        yield row


async def _timed_async(iterator: AsyncIterator[Any]) -> AsyncIterator[_Row]:
    while True:
        await asyncio.sleep(_PAUSE_S)
        row: _Row = []
        for _ in range(_IN_A_ROW):
            started = time.perf_counter()
            batch = await anext(iterator, None)
            row.append((time.perf_counter() - started, batch))
            if batch is None:
                yield row[:-1]
                return
        yield row


def _async(batches: Any) -> AsyncIterator[Any]:
    return aiter(batches) if hasattr(batches, "__aiter__") else _in_thread(iter(batches))


async def _in_thread(iterator: Iterator[Any]) -> AsyncIterator[Any]:
    while (batch := await asyncio.to_thread(next, iterator, None)) is not None:
        yield batch


class _Handovers:
    """What has been measured; keeps no batch, as a trainer keeps none."""

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._waits_us: list[list[float]] = []
        self._arrivals_s: list[float] = []

    def add(self, row: _Row) -> None:
        self._arrivals_s.append(time.monotonic())
        self._waits_us.append([waited_s * 1e6 for waited_s, _ in row])
        for _, batch in row:
            self._digest.add(batch)

    def measurement(self) -> Measurement:
        steady = self._waits_us[_WARM_UP:]
        in_a_row = sorted(waited_us for row in steady for waited_us in row[1:])
        return Measurement(
            numbers={
                "p50_us": statistics.median(in_a_row),
                "p99_us": in_a_row[int(len(in_a_row) * 0.99)],
                "cold_us": statistics.median(row[0] for row in steady if row),
            },
            num_records=self._digest.num_records,
            content=self._digest.content,
            order=self._digest.order,
            first_at_s=self._arrivals_s[0],
            last_at_s=self._arrivals_s[-1],
        )
