from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioloader.errors import ConfigError, ResumeError, SourceError
from aioloader.sources import IterableSource
from tests.sources.conformance import check_failure, read_all, read_with_cursors


def numbers(stop: int = 5) -> Iterator[int]:
    yield from range(stop)


def failing(failure: BaseException) -> Iterator[int]:
    yield from range(4)
    raise failure


class Counting:
    """Keeps its place between passes, counts what is asked of it."""

    def __init__(self, state: Any = None) -> None:
        self.next = 0
        self.given = 0
        self.saves = 0
        self.fixed = state

    def __iter__(self) -> Iterator[int]:
        while self.next < 10:
            self.next += 1
            self.given += 1
            yield self.next - 1

    def state_dict(self) -> Any:
        self.saves += 1
        return self.fixed or {"next": self.next}

    def load_state_dict(self, state: Any) -> None:
        self.next = state["next"]


@pytest.mark.parametrize("kind", [ValueError, KeyError, BaseException, RuntimeError, StopAsyncIteration])
async def test_a_failure_keeps_its_place(kind: type[BaseException]) -> None:
    failure = kind("boom")
    error = await check_failure(IterableSource(lambda: failing(failure), name="shard"), before=range(4), match="boom", kind=SourceError)
    assert isinstance(error, SourceError)
    assert error.record == ("shard", 4)
    assert error.__cause__ is failure


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit])
async def test_requests_to_exit_keep_their_place_and_kind(kind: type[BaseException]) -> None:
    await check_failure(IterableSource(lambda: failing(kind("boom"))), before=range(4), match="boom", kind=kind)


def test_an_interrupt_is_never_taken_for_the_end() -> None:
    reader = IterableSource(lambda: failing(KeyboardInterrupt("stop"))).open(0, None)
    assert reader.read(1) is not None
    with pytest.raises(KeyboardInterrupt, match="stop"):
        reader.read(5)
    with pytest.raises(SourceError, match="last read was interrupted"):
        reader.read(5)
    assert reader.cursor()["count"] == 1


async def test_resuming_at_a_failure_fails_again_there() -> None:
    source = IterableSource(lambda: failing(ValueError("boom")))
    reader = source.open(0, None)
    for _ in range(2):
        assert reader.read(10) is not None
    again = source.open(0, reader.cursor())
    with pytest.raises(SourceError, match=r"record iterable\[4\].*boom"):
        again.read(10)


def test_a_failure_on_the_way_to_the_cursor_names_its_record() -> None:
    reader = IterableSource(lambda: failing(ValueError("boom"))).open(0, {"count": 9, "state": None, "skip": 9, "end": False})
    for _ in range(2):
        with pytest.raises(SourceError, match=r"record iterable\[4\].*boom"):
            reader.read(1)


def test_an_upstream_that_fails_to_start_fails_at_the_first_record() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("no disk")

    with pytest.raises(SourceError, match=r"record iterable\[0\].*OSError: no disk"):
        IterableSource(Broken()).open(0, None).read(1)


def test_an_upstream_shorter_than_the_cursor_is_refused() -> None:
    reader = IterableSource(numbers).open(0, {"count": 9, "state": None, "skip": 9, "end": False})
    with pytest.raises(ResumeError, match=r"records of source iterable: expected 5 \(this loader\), got 'at least 9'"):
        reader.read(1)


async def test_a_generator_is_read_once() -> None:
    source = IterableSource(numbers())
    assert len(await read_all(source)) == 5
    with pytest.raises(ConfigError, match=r"a generator that was opened before; a generator can be read once, so pass the function"):
        source.open(1, None)


async def test_an_open_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("a\nb\n")
    source = IterableSource(path.open())
    assert [record for _, record in await read_all(source)] == ["a\n", "b\n"]
    with pytest.raises(ConfigError, match="was opened before"):
        source.open(1, None)


async def test_a_function_that_returns_the_same_generator_again_is_found_out() -> None:
    generator = numbers()
    source = IterableSource(lambda: generator)
    assert len(await read_all(source)) == 5
    with pytest.raises(ConfigError, match="was opened before"):
        source.open(1, None).read(1)


async def test_a_pass_left_in_the_middle_does_not_go_on_in_the_next() -> None:
    source = IterableSource(Counting())
    reader = source.open(0, None)
    assert reader.read(3) is not None
    reader.close()
    assert [record for _, record in await read_all(source)] == list(range(10))


async def test_resuming_with_state_reads_nothing_again() -> None:
    _, cursors = await read_with_cursors(IterableSource(Counting()), size=3)
    upstream = Counting()
    count, cursor = cursors[2]
    assert [record for _, record in await read_all(IterableSource(upstream), cursor=cursor)] == list(range(count, 10))
    assert upstream.given == 10 - count


def test_states_are_taken_only_for_cursors() -> None:
    upstream = Counting()
    reader = IterableSource(upstream).open(0, None)
    for _ in range(3):
        reader.read(1)
    before = upstream.saves
    assert reader.cursor() == reader.cursor() == {"count": 3, "state": {"next": 3}, "skip": 0, "end": False}
    assert upstream.saves == before + 1


def test_a_state_that_json_would_change_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Counting\.state_dict\(\): expected a state of dicts .* got \(1, 2\)"):
        IterableSource(Counting(state=(1, 2))).open(0, None).read(1)


def test_a_state_without_a_place_to_load_it_is_refused() -> None:
    reader = IterableSource(numbers).open(0, {"count": 3, "state": {"next": 3}, "skip": 0, "end": False})
    with pytest.raises(ResumeError, match="upstream numbers: expected 'one without'"):
        reader.read(1)


def test_closing_ends_the_generator() -> None:
    ended = []

    def generate() -> Iterator[int]:
        try:
            yield from range(5)
        finally:
            ended.append(True)

    reader = IterableSource(generate).open(0, None)
    reader.read(1)
    assert not ended
    reader.close()
    reader.close()
    assert ended == [True]


def test_a_failure_while_closing_is_a_source_error() -> None:
    def generate() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise OSError("no disk")

    reader = IterableSource(generate).open(0, None)
    reader.read(1)
    with pytest.raises(SourceError, match="OSError: no disk"):
        reader.close()


@pytest.mark.parametrize("upstream", ["text", b"bytes", {"a": 1}, 3, None, lambda one: [one], object()])
def test_what_is_no_stream_is_refused(upstream: Any) -> None:
    with pytest.raises(ConfigError, match="IterableSource: expected an iterable of records or a function without arguments"):
        IterableSource(upstream)


@pytest.mark.parametrize("function", [lambda: 3, lambda: "text", lambda: None])
def test_a_function_that_returns_no_stream_is_refused(function: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="got a function that returns"):
        IterableSource(function).open(0, None).read(1)


async def test_functions_with_bound_arguments_are_taken() -> None:
    source = IterableSource(functools.partial(numbers, 2))
    assert await read_all(source) == [(("iterable", 0), 0), (("iterable", 1), 1)]
    assert repr(IterableSource(numbers)) == "IterableSource(numbers, name='iterable')"
    assert IterableSource(numbers, name="n").fingerprint() == {"kind": "iterable", "name": "n", "of": "numbers"}
