"""Records in flight never exceed `buffer_size`, and no limit, however small, brings the loader to a stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from aioloader import FixedBatch, Loader, Pack, PretrainCollator, StackCollator
from tests.contract.cases import (
    INLINE,
    PROCESSES,
    THREAD_HOST,
    THREADS,
    Options,
    all_facts,
    collate,
    documents,
    name_of,
    numbers,
    some_or_many,
)


class Counting:
    """Counts what was read; for a host in this very process."""

    def __init__(self, num_records: int) -> None:
        self.num_records = num_records
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.num_records):
            self.num_read += 1
            yield number


def slow_first(number: int) -> int:
    if number == 0:
        time.sleep(1.5)
    return number


def very_slow_first(number: int) -> int:
    if number == 0:
        time.sleep(2.5)
    return number


def wait_until_steady(source: Counting, settle_s: float = 0.3) -> int:
    """Return how many records were read once no more are."""
    last, since = source.num_read, time.monotonic()
    while time.monotonic() - since < settle_s:
        time.sleep(0.01)
        if source.num_read != last:
            last, since = source.num_read, time.monotonic()
    return last


@pytest.mark.parametrize("options", [THREADS, THREAD_HOST], ids=name_of)
def test_a_slow_first_record_does_not_let_others_pile_up(options: Options) -> None:
    source = Counting(200)
    most = 0
    with Loader(source, preprocess=very_slow_first, batch=FixedBatch(1), collate=collate, buffer_size=8, **options) as loader:
        iterator = iter(loader)
        started = time.monotonic()
        while time.monotonic() - started < 2.0:
            time.sleep(0.02)
            most = max(most, source.num_read)
            assert loader.stats()["in_flight"] <= 8
        assert most == 8, "the others wait for the first, with a full buffer"
        delivered = []
        for batch in iterator:
            delivered += numbers([batch])
            assert source.num_read - len(delivered) <= 8 + 1, "the one just delivered was in flight until now"
        assert delivered == list(range(200))
        assert loader.stats()["peak_in_flight"] <= 8


def slow_first_and_when_done(number: int) -> dict[str, float]:
    return {"number": slow_first(number), "done_s": time.monotonic()}


def test_no_worker_is_idle_while_records_wait_behind_a_slow_one() -> None:
    """What was queued for the worker of the slow record goes to the other one."""
    with Loader(
        range(8), preprocess=slow_first_and_when_done, batch=FixedBatch(8), collate=StackCollator(), buffer_size=8, **PROCESSES
    ) as loader:
        (batch,) = loader
    done_s = batch["done_s"].tolist()
    assert batch["number"].tolist() == list(range(8))
    assert max(done_s[1:]) < done_s[0] - 0.5


def test_a_slow_first_record_with_a_sidecar() -> None:
    with Loader(range(200), preprocess=slow_first, batch=FixedBatch(1), collate=collate, buffer_size=8, **PROCESSES) as loader:
        assert numbers(loader) == list(range(200))
        assert loader.stats()["peak_in_flight"] == 8


@pytest.mark.parametrize("options", [THREADS, THREAD_HOST], ids=name_of)
@pytest.mark.parametrize("buffer_size", [4, 32])
def test_reading_stops_when_the_trainer_does(buffer_size: int, options: Options) -> None:
    source = Counting(5_000)
    with Loader(
        source, preprocess=lambda number: number, batch=FixedBatch(4), collate=collate, buffer_size=buffer_size, **options
    ) as loader:
        iterator = iter(loader)
        for taken in (1, 3):
            delivered = [next(iterator) for _ in range(taken)]
            assert len(delivered) == taken
            num_delivered = 4 * loader.stats()["delivered_batches"]
            assert wait_until_steady(source, settle_s=1.0) - num_delivered <= buffer_size
            assert loader.stats()["in_flight"] == source.num_read - num_delivered
        iterator.close()


def test_prefetched_batches_are_bounded_too() -> None:
    with Loader(range(5_000), batch=FixedBatch(4), collate=collate, prefetch_batches=3, **THREADS) as loader:
        iterator = iter(loader)
        next(iterator)
        deadline = time.monotonic() + 5
        while loader.stats()["waiting_batches"] < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert loader.stats()["waiting_batches"] == 3
        iterator.close()


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=name_of)
def test_a_batch_larger_than_the_buffer_still_works(options: Options) -> None:
    with Loader(range(100), batch=FixedBatch(30), collate=collate, buffer_size=4, **options) as loader:
        assert numbers(loader) == list(range(90))
        assert loader.stats()["peak_in_flight"] <= 30 + 4


@pytest.mark.parametrize("options", [THREADS, PROCESSES], ids=name_of)
def test_everything_at_its_smallest(options: Options) -> None:
    """K38."""
    smallest: Options = {**options, "workers": 1, "buffer_size": 1, "prefetch_batches": 1}
    for batch_size in (1, 3):
        with Loader(range(200), batch=FixedBatch(batch_size), collate=collate, end="pad", **smallest) as loader:
            assert numbers(loader) == list(range(200))


@pytest.mark.parametrize(("lanes", "buffer_size"), [(1, 1), (3, 2), (3, 9), (8, 1), (8, 5)])
def test_no_small_buffer_stops_lanes_and_packing(lanes: int, buffer_size: int) -> None:
    options: Options = {"preprocess": some_or_many, "lanes": lanes, "epochs": 2, "collate": PretrainCollator()}
    for batch in (FixedBatch(4), Pack(40, rows=2)):
        with Loader(documents(150), batch=batch, **options, **INLINE) as loader:
            reference = all_facts(loader)
        assert reference
        with Loader(documents(150), batch=batch, buffer_size=buffer_size, prefetch_batches=1, **options, **THREADS) as loader:
            assert all_facts(loader) == reference
            assert loader.stats()["in_flight"] == 0, "every slot came back"


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
def test_records_that_are_all_filtered_do_not_hold_slots(options: Options) -> None:
    def rarely(number: int) -> Any:
        return number if number % 500 == 499 else None

    with Loader(range(2_000), preprocess=rarely, batch=FixedBatch(1), collate=collate, buffer_size=4, **options) as loader:
        assert numbers(loader) == [499, 999, 1499, 1999]
        assert loader.stats()["records"]["filtered_records"] == 1_996
        assert loader.stats()["in_flight"] == 0


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
def test_an_epoch_that_gives_nothing_ends_an_endless_run(options: Options) -> None:
    with (
        Loader(range(5), batch=FixedBatch(8), collate=collate, epochs=None, **options) as loader,
        pytest.raises(Exception, match="for ever"),
    ):
        next(iter(loader))
    with Loader([], batch=FixedBatch(8), collate=collate, **options) as loader:
        assert list(loader) == []
        assert list(loader) == []


# What the trainer waits for


class SlowSource:
    """Gives a record every 20 ms."""

    def __iter__(self) -> Iterator[int]:
        for number in range(20):
            time.sleep(0.02)
            yield number


def slow(number: int) -> int:
    time.sleep(0.03)
    return number


def slow_once(number: int) -> int:
    time.sleep(0.5 if number == 8 else 0.001)
    return number


@pytest.mark.parametrize("options", [PROCESSES, THREAD_HOST], ids=name_of)
@pytest.mark.parametrize(
    ("source", "preprocess", "pause_s", "cause"),
    [
        (SlowSource(), None, 0.0, "source"),
        (range(30), slow, 0.0, "cpu"),
        (range(33), slow_once, 0.0, "order"),
        (range(20), None, 0.05, "consumer"),
    ],
    ids=["source", "cpu", "order", "consumer"],
)
def test_what_the_trainer_waits_for_is_named(source: Any, preprocess: Any, pause_s: float, cause: str, options: Options) -> None:
    with Loader(source, preprocess=preprocess, batch=FixedBatch(1), collate=collate, buffer_size=32, **options) as loader:
        causes: dict[str, float] = {}
        for step, batch in enumerate(loader):
            if step >= 2:  # the first wait is for the start
                causes[batch.wait_cause] = causes.get(batch.wait_cause, 0.0) + (batch.wait_s if cause != "consumer" else 1)
            time.sleep(pause_s)
        stats = loader.stats()
    assert max(causes, key=causes.__getitem__) == cause, causes
    assert set(stats["waits"]) == {"source", "cpu", "order", "consumer", "ranks"}
    assert sum(entry["batches"] for entry in stats["waits"].values()) == stats["delivered_batches"]
    assert stats["consumer_wait_s"] == pytest.approx(sum(entry["wait_s"] for entry in stats["waits"].values()))
    assert stats["stages"]["preprocess"]["rate_per_s"] > 0
