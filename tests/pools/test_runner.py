"""Runner: what a record becomes, in order, until one fails."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.pools.chunk import Chunk, Outcome
from aioloader.pools.runner import Preprocess, Runner, describe_failure
from aioloader.protocols import RecordId


class Brackets:
    """A seeding that writes down what it was told."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def begin(self, epoch: int, record: RecordId) -> None:
        self.log.append((epoch, record))

    def end(self) -> None:
        self.log.append("end")


def run(function: Callable[..., Any] | None, records: list[Any], *, seeding: Brackets | None = None, **options: Any) -> Outcome:
    runner = Runner(Preprocess(function=function, **options), seeding or Brackets())
    ids: list[RecordId] = [("shard", row) for row in range(len(records))]
    return runner.run(Chunk(4, records, ids))


results: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.integers(), st.lists(st.integers(), max_size=3), st.tuples(st.integers(), st.integers()), st.just({})
)


@given(made=st.lists(results, max_size=12))
def test_none_is_filtered_a_list_is_its_elements_and_the_rest_is_one_sample(made: list[Any]) -> None:
    outcome = run(lambda record: made[record], list(range(len(made))))
    expected = [[] if one is None else one if type(one) is list else [one] for one in made]
    assert outcome.num_done == len(made)
    assert list(outcome.samples) == list(itertools.chain(*expected))
    assert outcome.counts == (None if all(len(one) == 1 for one in expected) else [len(one) for one in expected])
    assert outcome.failure is None


@given(
    sizes=st.lists(st.integers(0, 50), max_size=12), max_bytes=st.integers(0, 100), wrap=st.sampled_from(["bare", "dict", "list", "none"])
)
def test_records_after_the_one_whose_samples_take_too_much_are_left(sizes: list[int], max_bytes: int, wrap: str) -> None:
    samples = [np.zeros(size, np.uint8) for size in sizes]
    wrapped: dict[str, Callable[[Any], Any]] = {
        "bare": lambda sample: sample,
        "dict": lambda sample: {"x": sample, "more": {"y": sample[:0]}},
        "list": lambda sample: [{"x": sample}],
        "none": lambda sample: sample,
    }
    runner = Runner(Preprocess(function=None if wrap == "none" else lambda row: wrapped[wrap](samples[row])), Brackets())
    ids: list[RecordId] = [("shard", row) for row in range(len(sizes))]
    records = samples if wrap == "none" else list(range(len(sizes)))
    outcome = runner.run(Chunk(0, records, ids, max_bytes=max_bytes))
    totals = list(itertools.accumulate(sizes))
    expected = next((row + 1 for row, total in enumerate(totals) if total > max_bytes), len(sizes))
    assert (outcome.num_done, len(outcome.samples), outcome.failure) == (expected, expected, None)
    assert outcome.counts is None or wrap == "list"


@given(bad=st.integers(0, 9), size=st.integers(0, 10))
def test_records_after_a_failure_are_not_run(bad: int, size: int) -> None:
    ran: list[int] = []

    def work(record: int) -> list[int]:
        ran.append(record)
        if record == bad:
            raise LookupError("bad")
        return [record] * (record % 3)

    outcome = run(work, list(range(size)))
    num_done = min(bad, size)
    assert ran == list(range(min(bad + 1, size)))
    assert outcome.num_done == num_done
    assert list(outcome.samples) == [record for record in range(num_done) for _ in range(record % 3)]
    assert (outcome.failure is not None) == (bad < size)


def test_records_pass_through_without_a_function() -> None:
    records = [None, [1, 2], "text"]
    outcome = run(None, records)
    assert (outcome.num_done, outcome.counts, list(outcome.samples)) == (3, None, records)


def test_every_record_is_bracketed_also_the_one_that_fails() -> None:
    seeding = Brackets()

    def work(record: int) -> int:
        if record == 1:
            raise ValueError
        return record

    run(work, [0, 1, 2], seeding=seeding)
    own = [entry for entry in seeding.log if entry == "end" or (isinstance(entry, tuple) and entry[1][0] == "shard")]
    assert own[-4:] == [(4, ("shard", 0)), "end", (4, ("shard", 1)), "end"]
    assert (4, ("shard", 2)) not in seeding.log


# worker_init


def test_worker_init_is_called_once_and_its_object_is_the_second_argument() -> None:
    made: list[list[int]] = []

    def init() -> list[int]:
        made.append([])
        return made[-1]

    runner = Runner(Preprocess(function=lambda record, seen: seen.append(record) or len(seen), worker_init=init), Brackets())
    assert made == []
    for first in (0, 2):
        outcome = runner.run(Chunk(0, [first, first + 1], [("shard", first), ("shard", first + 1)]))
        assert list(outcome.samples) == [first + 1, first + 2]
    assert made == [[0, 1, 2, 3]]


def test_a_worker_init_that_failed_is_tried_again() -> None:
    tries: list[int] = []

    def init() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not yet")
        return "ready"

    runner = Runner(Preprocess(function=lambda _record, made: made, worker_init=init), Brackets())
    chunk = Chunk(0, [1], [("shard", 1)])
    failure = runner.run(chunk).failure
    assert failure is not None
    assert failure.message == "not yet"
    assert runner.run(chunk).samples == ["ready"]


def test_what_worker_init_returns_may_be_none() -> None:
    assert run(lambda record, made: (record, made), [1, 2], worker_init=lambda: None).samples == [(1, None), (2, None)]


# batched


def test_columns() -> None:
    def work(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        assert set(rows) == {"text"}
        return {"word": rows["text"][0].split(), "length": [len(word) for word in rows["text"][0].split()]}

    outcome = run(work, [{"text": "a bc"}, {"text": ""}, OrderedDict(text="d"), MappingProxyType({"text": "e f g"})], batched=True)
    assert outcome.failure is None
    assert outcome.counts == [2, 0, 1, 3]
    assert outcome.samples[:2] == [{"word": "a", "length": 1}, {"word": "bc", "length": 2}]


@pytest.mark.parametrize("result", [None, {}, {"a": []}, {"a": [], "b": []}])
def test_no_columns_filter_the_record(result: Any) -> None:
    outcome = run(lambda _rows: result, [{"a": 1}] * 3, batched=True)
    assert (outcome.num_done, outcome.counts, list(outcome.samples), outcome.failure) == (3, [0, 0, 0], [], None)


def test_ragged_columns_are_refused() -> None:
    failure = run(lambda _rows: {"a": [1, 2], "b": [1]}, [{"a": 1}], batched=True).failure
    assert failure is not None
    assert failure.message == (
        "preprocess(batched=True): expected columns of equal length, got 'a' has 2, 'b' has 1; return one value per sample in each column."
    )


def test_records_of_columns_are_mappings() -> None:
    failure = run(lambda rows: rows, [[1, 2]], batched=True).failure
    assert failure is not None
    assert "preprocess(batched=True): expected records that are mappings, got list; use batched=False." in failure.message


# Failures


class Odd(BaseException):
    pass


def fail(error: BaseException) -> NoReturn:
    raise error


@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError("k"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(1), Odd("odd")], ids=repr
)
def test_whatever_is_raised_is_a_failure(error: BaseException) -> None:
    outcome = run(fail, [error])
    assert outcome.num_done == 0
    failure = outcome.failure
    assert failure is not None
    assert (failure.kind, failure.message, failure.error) == (type(error).__name__, str(error), error)
    assert failure.kinds[0].endswith(type(error).__name__)
    assert "in fail" in failure.traceback
    assert "aioloader/pools/runner.py" not in failure.traceback


def test_a_generator_that_fails_half_way_gives_nothing() -> None:
    def samples(record: int) -> Iterator[int]:
        yield record
        raise ValueError("half way")

    outcome = run(lambda record: list(samples(record)), [1])
    assert (outcome.num_done, list(outcome.samples)) == (0, [])


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_that_cannot_be_printed_is_described_all_the_same() -> None:
    failure = describe_failure(UnspeakableError())
    assert failure.kind == "UnspeakableError"
    assert failure.message
