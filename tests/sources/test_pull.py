from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ConfigError, SourceError
from aioloader.sources.pull import Pace, located, pull, pull_async, source_error


class Clock:
    """Moves on by `step_s` with every look."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def failing(after: int, failure: BaseException) -> Iterator[int]:
    yield from range(after)
    raise failure


@given(total=st.integers(0, 30), sizes=st.lists(st.integers(1, 9), min_size=31, max_size=31), step_s=st.sampled_from([0.0, 0.003, 0.02]))
def test_pulls_in_a_row_give_every_record_once(total: int, sizes: list[int], step_s: float) -> None:
    iterator = iter(range(total))
    found: list[int] = []
    for size in sizes:
        pulled = pull(iterator, size, clock=Clock(step_s))
        assert pulled.failure is None
        assert len(pulled.records) <= size
        assert pulled.ended or pulled.records
        found += pulled.records
        if pulled.ended:
            break
    assert found == list(range(total))


@pytest.mark.parametrize(("step_s", "expected"), [(0.0, 100), (0.001, 10), (0.004, 3), (1.0, 1)])
async def test_a_slow_upstream_is_not_held_back(step_s: float, expected: int) -> None:
    async def numbers() -> AsyncGenerator[int, None]:
        for number in count():
            yield number

    assert len(pull(count(), 100, clock=Clock(step_s)).records) == expected
    iterator = numbers()
    assert len((await pull_async(iterator, 100, clock=Clock(step_s))).records) == expected
    assert (await pull_async(iterator, 1)).records == [expected]
    await iterator.aclose()


@pytest.mark.parametrize("kind", [ValueError, StopAsyncIteration, BaseException, asyncio.CancelledError, SystemExit, GeneratorExit])
def test_a_failure_comes_after_the_records_before_it(kind: type[BaseException]) -> None:
    failure = kind("here")
    pulled = pull(failing(3, failure), 10)
    assert pulled == ([0, 1, 2], failure, False)


def test_a_stop_iteration_raised_in_a_generator_is_a_failure() -> None:
    pulled = pull(failing(2, StopIteration("early")), 10)
    assert pulled.records == [0, 1]
    assert isinstance(pulled.failure, RuntimeError)
    assert not pulled.ended


def test_an_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt, match="now"):
        pull(failing(3, KeyboardInterrupt("now")), 10)


async def test_a_failure_of_an_async_upstream_comes_after_the_records_before_it() -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 0
        raise failure

    for failure in (ValueError("here"), BaseException("here"), asyncio.CancelledError("nobody asked")):
        assert await pull_async(numbers(), 10) == ([0], failure, False)
    failure = StopAsyncIteration("early")
    assert isinstance((await pull_async(numbers(), 10)).failure, RuntimeError)


async def test_a_cancellation_that_was_asked_for_passes() -> None:
    started = asyncio.Event()

    async def numbers() -> AsyncIterator[int]:
        yield 0
        started.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(pull_async(numbers(), 10))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_source_error_names_the_record_and_keeps_the_cause() -> None:
    failure = ValueError("bad bytes")
    error = source_error(failure, ("shard", 7))
    assert isinstance(error, SourceError)
    assert error.record == ("shard", 7)
    assert error.__cause__ is failure
    assert str(error) == (
        "stage source, record shard[7]: expected a record from the upstream, got ValueError: bad bytes; mend what its traceback shows"
    )


@pytest.mark.parametrize(
    "make",
    [lambda: ConfigError("here", expected="a", got="b", do="c"), lambda: SourceError("gone"), KeyboardInterrupt, SystemExit, GeneratorExit],
)
def test_source_error_leaves_our_own_errors_and_requests_to_exit(make: Callable[[], BaseException]) -> None:
    failure = make()
    assert source_error(failure, ("shard", 7)) is failure
    with pytest.raises(type(failure)) as caught, located(("shard", 7)):
        raise failure
    assert caught.value is failure
    assert failure.__cause__ is None


def test_located_leaves_other_kinds_alone() -> None:
    with pytest.raises(asyncio.CancelledError), located(("shard", 7), Exception):
        raise asyncio.CancelledError
    with pytest.raises(SourceError, match=r"record shard\[7\].*OSError: gone"), located(("shard", 7), Exception):
        raise OSError("gone")


def test_few_records_are_asked_for_until_the_upstream_is_quick_and_again_when_it_was_slow() -> None:
    pace = Pace()
    asked = []
    for seconds in (0.001, 0.001, 0.001, 0.001, 0.02, 0.001):
        asked.append(pace.start(100, 5.0))
        pace.finish(asked[-1], 5.0 + seconds)
    assert asked == [1, 4, 16, 64, 100, 1]
