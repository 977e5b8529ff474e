from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from aioloader.errors import ConfigError, SourceError
from aioloader.sources import AsyncIterableSource
from tests.sources.conformance import check_failure, check_source, read_all

BACKENDS = ["asyncio", "trio"]


async def numbers() -> AsyncIterator[int]:
    for number in range(12):
        await anyio.lowlevel.checkpoint()
        yield number


@pytest.mark.parametrize("backend", BACKENDS)
def test_contract_under_both_backends(backend: str) -> None:
    async def main() -> None:
        await check_source(AsyncIterableSource(numbers), list(range(12)))

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [ValueError, BaseException, StopAsyncIteration])
def test_a_failure_keeps_its_place(backend: str, kind: type[BaseException]) -> None:
    async def failing() -> AsyncIterator[int]:
        yield 0
        yield 1
        raise kind("boom")

    async def main() -> None:
        error = await check_failure(AsyncIterableSource(failing), before=[0, 1], match=r"record async_iterable\[2\]", kind=SourceError)
        assert isinstance(error.__cause__, RuntimeError if kind is StopAsyncIteration else kind)

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_read_is_never_taken_for_the_end(backend: str) -> None:
    waiting = anyio.Event

    async def main() -> None:
        reached = waiting()

        async def stuck() -> AsyncIterator[int]:
            yield 0
            yield 1
            reached.set()
            await anyio.sleep_forever()

        source = AsyncIterableSource(stuck)
        reader = source.open(0, None)
        assert await reader.read(1) is not None
        async with anyio.create_task_group() as group:
            group.start_soon(reader.read, 5)
            await reached.wait()
            group.cancel_scope.cancel()
        with pytest.raises(SourceError, match="last read was interrupted"):
            await reader.read(5)
        assert reader.cursor()["count"] == 1
        await reader.aclose()
        again = source.open(0, reader.cursor())
        span = await again.read(1)
        assert span is not None
        assert span.records == [1]
        await again.aclose()

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_ends_the_generator(backend: str) -> None:
    ended: list[bool] = []

    async def generate() -> AsyncIterator[int]:
        try:
            yield 0
            yield 1
        finally:
            await anyio.lowlevel.checkpoint()
            ended.append(True)

    async def main() -> None:
        reader = AsyncIterableSource(generate).open(0, None)
        assert await reader.read(1) is not None
        await reader.aclose()
        await reader.aclose()

    anyio.run(main, backend=backend)
    assert ended == [True]


async def test_an_async_generator_is_read_once() -> None:
    source = AsyncIterableSource(numbers())
    assert len(await read_all(source)) == 12
    with pytest.raises(ConfigError, match=r"a async_generator that was opened before; a generator can be read once"):
        source.open(1, None)


async def no_iterable() -> list[int]:
    return []


@pytest.mark.parametrize("upstream", [3, [1], "text", lambda one: one])
def test_what_is_no_async_stream_is_refused(upstream: Any) -> None:
    with pytest.raises(ConfigError, match="AsyncIterableSource: expected an async iterable of records or a function"):
        AsyncIterableSource(upstream)


@pytest.mark.parametrize("function", [no_iterable, lambda: [1]])
async def test_a_function_that_returns_no_async_stream_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"got a function that returns (coroutine|list); pass an async generator function"):
        await AsyncIterableSource(function).open(0, None).read(1)
