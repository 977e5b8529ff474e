"""How long it takes to get a batch that is ready: the consumer sleeps before it asks."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from tests.benchmarks.contestants import Feed
from tests.benchmarks.digest import Digest
from tests.benchmarks.task import Measurement

__all__ = ["measure", "measure_async"]

_PAUSE_S = 0.02
_WARM_UP = 8


def measure(feed: Feed, digest: Digest) -> Measurement:
    """Time `next`."""
    with feed as batches:
        return _measured(_timed(iter(batches)), digest)


def measure_async(feed: Feed, digest: Digest) -> Measurement:
    """Time `anext`, and for a loader that has none, `next` in a thread: what an asyncio program does with it."""
    with feed as batches:
        return _measured(asyncio.run(_all(_timed_async(_async(batches)))), digest)


def _timed(iterator: Iterator[Any]) -> Iterator[tuple[float, Any]]:
    while True:
        time.sleep(_PAUSE_S)
        started = time.perf_counter()
        batch = next(iterator, None)
        waited_s = time.perf_counter() - started
        if batch is None:
            return
        yield waited_s, batch


async def _timed_async(iterator: AsyncIterator[Any]) -> AsyncIterator[tuple[float, Any]]:
    while True:
        await asyncio.sleep(_PAUSE_S)
        started = time.perf_counter()
        batch = await anext(iterator, None)
        waited_s = time.perf_counter() - started
        if batch is None:
            return
        yield waited_s, batch


async def _all(timed: AsyncIterator[tuple[float, Any]]) -> list[tuple[float, Any]]:
    return [pair async for pair in timed]


def _async(batches: Any) -> AsyncIterator[Any]:
    return aiter(batches) if hasattr(batches, "__aiter__") else _in_thread(iter(batches))


async def _in_thread(iterator: Iterator[Any]) -> AsyncIterator[Any]:
    while (batch := await asyncio.to_thread(next, iterator, None)) is not None:
        yield batch


def _measured(timed: Iterable[tuple[float, Any]], digest: Digest) -> Measurement:
    waits_us: list[float] = []
    arrivals_s: list[float] = []
    for waited_s, batch in timed:
        arrivals_s.append(time.monotonic())
        waits_us.append(waited_s * 1e6)
        digest.add(batch)
    steady = sorted(waits_us[_WARM_UP:])
    return Measurement(
        numbers={"p50_us": statistics.median(steady), "p99_us": steady[int(len(steady) * 0.99)]},
        num_records=digest.num_records,
        content=digest.content,
        order=digest.order,
        first_at_s=arrivals_s[0],
        last_at_s=arrivals_s[-1],
    )
