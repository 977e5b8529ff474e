"""Who does what: one reader reads, workers preprocess what it hands them, and numbers alone decide the order.

A number like A033 is a row that asks for it; `test_contract_coverage.py` lists them all.
"""

from __future__ import annotations

import inspect
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioloader import FixedBatch, Loader, Mesh, suggest_async_config
from aioloader.pools.chunk import Chunk
from aioloader.pools.processes import ProcessPool
from aioloader.pools.runner import Preprocess
from aioloader.pools.threads import ThreadPool
from tests.contract.cases import INLINE, PROCESSES, THREAD_HOST, THREADS, Options, as_list, collate, draw, name_of, numbers

POOLS = pytest.mark.parametrize("options", [THREADS, THREAD_HOST, PROCESSES], ids=name_of)


def samples(loader: Loader) -> list[Any]:
    return [sample for batch in loader for sample in batch["samples"]]


def wait_for(condition: Callable[[], bool]) -> None:
    """Return once `condition` holds; the test's own time limit ends a wait for what never happens."""
    while not condition():
        time.sleep(0.005)


def gated(gate: Path) -> Callable[[int], int]:
    """Return a preprocess function that lets the first record through only once a file exists."""

    def work(number: int) -> int:
        while number == 0 and not gate.exists():
            time.sleep(0.002)
        return number

    return work


@POOLS
def test_one_reader_reads_and_only_workers_preprocess(options: Options) -> None:
    """A034, A050: each record says who read it and in which pass, each sample who made it."""
    num_passes = 0

    def upstream() -> Iterator[dict[str, Any]]:
        nonlocal num_passes
        num_passes += 1
        for number in range(64):
            yield {"number": number, "num_passes": num_passes, "reader": (os.getpid(), threading.get_ident())}

    def make(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "maker": (os.getpid(), threading.get_ident())}

    with Loader(upstream, preprocess=make, batch=FixedBatch(8), collate=as_list, **options) as loader:
        for epoch in range(2):
            made = samples(loader)
            assert [sample["number"] for sample in made] == list(range(64))
            assert {sample["num_passes"] for sample in made} == {epoch + 1}
            (reader,) = {sample["reader"] for sample in made}
            makers = {sample["maker"] for sample in made}
            assert 1 <= len(makers) <= options["workers"]
            assert not makers & {reader, (os.getpid(), threading.get_ident())}


@POOLS
def test_nothing_overtakes_the_first_record(options: Options, tmp_path: Path) -> None:
    """A037, A057, A058: later results are kept until it is ready, and then come in order."""
    gate = tmp_path / "gate"
    with Loader(range(40), preprocess=gated(gate), batch=FixedBatch(1), collate=collate, buffer_size=40, **options) as loader:
        iterator = iter(loader)
        wait_for(lambda: loader.stats()["stages"]["preprocess"]["count"] >= 4)
        stats = loader.stats()
        assert (stats["waiting_batches"], stats["stages"]["batch"]["count"]) == (0, 0)
        gate.touch()
        assert numbers(iterator) == list(range(40))


@POOLS
def test_a_larger_buffer_holds_more_and_none_more_than_it_may(options: Options, tmp_path: Path) -> None:
    """A013: while the first record is slow, as many records as the buffer has room for are read, and no more."""
    for buffer_size in (2, 8):
        gate = tmp_path / str(buffer_size)
        with Loader(range(60), preprocess=gated(gate), batch=FixedBatch(1), collate=collate, buffer_size=buffer_size, **options) as loader:
            iterator = iter(loader)
            wait_for(lambda expected=buffer_size, loader=loader: loader.stats()["in_flight"] >= expected)  # type: ignore[misc]
            gate.touch()
            assert numbers(iterator) == list(range(60))
            assert loader.stats()["peak_in_flight"] == buffer_size


@pytest.mark.parametrize("options", [INLINE, THREADS, THREAD_HOST], ids=name_of)
def test_the_buffer_changes_neither_what_a_call_gets_nor_what_it_makes(options: Options) -> None:
    """A012, A019, A047: a batched function gets lists of one value."""

    def told(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"got": [dict(columns)]}

    records = [{"number": number, "text": f"text {number}"} for number in range(60)]
    for buffer_size in (1, 8, 64):
        with Loader(
            records, preprocess=told, batched=True, batch=FixedBatch(4), collate=as_list, buffer_size=buffer_size, **options
        ) as loader:
            assert samples(loader) == [{"got": {name: [value] for name, value in record.items()}} for record in records]


def drop_odd_double_fourth(number: int) -> list[int]:
    return [] if number % 2 else [number, -number] if number % 4 == 0 else [number]


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
def test_what_a_rank_makes_comes_from_its_own_records(options: Options) -> None:
    """A033: filtering and expansion move no border between ranks."""
    for dp_rank in range(3):
        mesh = Mesh(dp_rank=dp_rank, dp_size=3)
        with Loader(range(60), preprocess=drop_odd_double_fourth, batch=FixedBatch(1), collate=collate, mesh=mesh, **options) as loader:
            assert numbers(loader) == [made for number in range(dp_rank, 60, 3) for made in drop_odd_double_fourth(number)]


def test_ranks_keep_their_sequences_whichever_worker_is_slow(tmp_path: Path) -> None:
    """A054, A055, A056, A060: on rank 0 the first record is ready only after a later one; numbers count the rank's own records."""

    def first_after_another(number: int) -> str:
        while number == 0 and not any((tmp_path / later).exists() for later in ("s2", "s4")):
            time.sleep(0.002)
        (tmp_path / f"s{number}").touch()
        return f"s{number}"

    options: Options = {"batch": FixedBatch(1), "collate": as_list, "buffer_size": 6, **PROCESSES}  # each of the six travels alone
    delivered = []
    for dp_rank in range(2):
        with Loader(range(6), preprocess=first_after_another, mesh=Mesh(dp_rank=dp_rank, dp_size=2), **options) as loader:
            delivered.append([(*batch["samples"], *((sample.seq, sample.row) for sample in batch.samples)) for batch in loader])
    assert delivered == [[("s0", (0, 0)), ("s2", (1, 2)), ("s4", (2, 4))], [("s1", (0, 1)), ("s3", (1, 3)), ("s5", (2, 5))]]


@pytest.mark.parametrize("dp_size", [2, 4])
def test_what_a_record_becomes_does_not_depend_on_its_rank(dp_size: int) -> None:
    """A031: nothing below the order knows of ranks, not even the random numbers."""

    def made(mesh: Mesh) -> list[Any]:
        with Loader(range(32), preprocess=draw, batch=FixedBatch(2), collate=as_list, lanes=4, mesh=mesh, seed=3, **INLINE) as loader:
            return samples(loader)

    ranks = [sample for dp_rank in range(dp_size) for sample in made(Mesh(dp_rank=dp_rank, dp_size=dp_size))]
    assert sorted(ranks, key=lambda sample: int(sample["number"])) == sorted(made(Mesh()), key=lambda sample: int(sample["number"]))


@pytest.mark.parametrize("part", [Chunk, Preprocess, ProcessPool, ThreadPool])
def test_preprocessing_is_told_nothing_of_ranks(part: Callable[..., Any]) -> None:
    """A031."""
    assert not [name for name in inspect.signature(part).parameters if "rank" in name or "mesh" in name or "lane" in name]


@POOLS
def test_workers_and_buffer_that_are_left_out_are_numbers_in_the_end(options: Options) -> None:
    with Loader(range(40), batch=FixedBatch(4), collate=collate, **{**options, "workers": None}) as loader:
        assert len(list(loader)) == 10
        stats = loader.stats()
    assert stats["workers"] == len(os.sched_getaffinity(0))
    assert isinstance(stats["buffer_size"], int)
    assert stats["buffer_size"] >= stats["workers"]


# Numbers to tune by


def in_bursts(number: int) -> bytes:
    time.sleep(0.1 if number % 4 == 0 else 0.0)
    return bytes(1000)


def test_idle_workers_and_buffered_bytes_are_seen() -> None:
    """A041: one record in flight leaves seven of eight workers without work."""
    with Loader(range(12), preprocess=in_bursts, batch=FixedBatch(1), collate=collate, workers=8, buffer_size=1) as loader:
        fractions = [loader.stats()["worker_idle_fraction"] for _ in loader]
    assert fractions[-1] > 0.5
    with Loader(range(64), preprocess=in_bursts, batch=FixedBatch(1), collate=collate, workers=2, buffer_size=64) as loader:
        iterator = iter(loader)
        next(iterator)
        wait_for(lambda: loader.stats()["buffered_bytes"] > 20_000)
        assert loader.stats()["buffered_bytes"] <= loader.stats()["in_flight_bytes"] <= loader.stats()["peak_in_flight_bytes"]


def one_millisecond(number: int) -> int:
    time.sleep(0.001)
    return number


def twenty_milliseconds(number: int) -> int:
    time.sleep(0.02)
    return number


@POOLS
def test_the_times_that_advice_needs_are_measured(options: Options) -> None:
    """A043: both are of the size that they were made to be."""
    with Loader(range(24), preprocess=twenty_milliseconds, batch=FixedBatch(2), collate=collate, **options) as loader:
        for _ in loader:
            time.sleep(0.02)
        stats = loader.stats()
    assert 0.02 <= stats["mean_preprocess_s"] < 0.06
    assert 0.008 <= stats["mean_train_s"] < 0.03
    advice = suggest_async_config(stats["mean_preprocess_s"], stats["mean_train_s"], workers=1)
    assert 2 <= advice.workers <= 8


def stages_of(source: Any, step_s: float, **options: Any) -> dict[str, tuple[float, float]]:
    """Return the seconds at work and waiting of each stage over 35 steps of some length, those of the start left out."""
    with Loader(source, batch=FixedBatch(2), collate=collate, buffer_size=8, prefetch_batches=2, **options) as loader:
        for batch in loader:
            if batch.step == 4:
                before = loader.stats()["stages"]
            time.sleep(step_s)
        after = loader.stats()["stages"]
    return {name: tuple(after[name][unit] - before[name][unit] for unit in ("service_s", "wait_s")) for name in after}


@POOLS
def test_behind_a_slow_trainer_the_source_waits_for_room_and_the_bridge_for_the_trainer(options: Options) -> None:
    stages = stages_of(range(80), 0.02, **options)
    for name in ("source", "bridge"):
        service_s, wait_s = stages[name]
        assert wait_s > 0.5 * 35 * 0.02, stages
        assert 0 < service_s < 0.2 * wait_s, stages


@POOLS
def test_a_slow_source_is_at_work_nearly_all_the_time_and_holds_up_the_order(options: Options) -> None:
    def slowly() -> Iterator[int]:
        for number in range(80):
            time.sleep(0.01)
            yield number

    stages = stages_of(slowly, 0.0, **options)
    service_s, wait_s = stages["source"]
    assert service_s > 0.5 * 70 * 0.01, stages
    assert wait_s < 0.2 * service_s, stages
    assert stages["order"][1] > 0.5 * service_s, stages
    assert stages["bridge"][1] < 0.2 * service_s, stages


def slow_and_large(samples: list[Any]) -> dict[str, Any]:
    time.sleep(0.005)
    return {"x": np.ones((len(samples), 1 << 18))}


@POOLS
def test_collating_and_copying_are_counted_where_they_are_done(options: Options) -> None:
    """Each of 20 micro-batches takes 5 ms to collate and is 4 MiB to copy."""
    with Loader(range(40), batch=FixedBatch(2), collate=slow_and_large, **options) as loader:
        for _ in loader:
            pass
        stages = loader.stats()["stages"]
    assert stages["batch"]["service_s"] >= 20 * 0.005
    assert stages["bridge"]["service_s"] > 20 * 0.0002, stages


def waits(preprocess: Callable[[int], int], **options: Any) -> list[float]:
    """Return how long a trainer whose steps take 20 ms waited for each micro-batch, those of the start left out."""
    with Loader(range(50), preprocess=preprocess, batch=FixedBatch(1), collate=collate, **options) as loader:
        found = []
        for batch in loader:
            found.append(batch.wait_s)
            time.sleep(0.02)
    return found[20:]


def test_a_trainer_waits_for_preprocessing_only_where_that_is_inline() -> None:
    """A005: both take 20 ms a record; four workers are three more than are needed."""
    assert min(waits(twenty_milliseconds, **INLINE)) >= 0.018
    assert statistics.median(waits(twenty_milliseconds, **{**THREADS, "workers": 4})) < 0.002


def test_a_larger_buffer_gives_a_slow_trainer_nothing() -> None:
    """A042: of each step, less than 3 percent."""
    small, large = (statistics.median(waits(one_millisecond, **{**THREADS, "buffer_size": size})) for size in (8, 64))
    assert small - large < 0.03 * 0.02
    assert small < 0.002, "it hardly waits at all"


# Where workers run


def cpus(_: int) -> Any:
    return {"cpus": sorted(os.sched_getaffinity(0))}


def test_workers_stay_on_the_cpus_they_are_given() -> None:
    usable = sorted(os.sched_getaffinity(0))
    with Loader(range(40), preprocess=cpus, batch=FixedBatch(1), collate=as_list, workers=2, worker_cpus=usable[:1]) as loader:
        assert {tuple(sample["cpus"]) for sample in samples(loader)} == {(usable[0],)}
    with Loader(range(40), preprocess=cpus, batch=FixedBatch(1), collate=as_list, workers=2) as loader:
        assert {tuple(sample["cpus"]) for sample in samples(loader)} == {tuple(usable)}
