"""Every host and pool gives the same, under asyncio, uvloop, trio and none."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch.utils.data
import trio

from aioloader import ClosedError, ConfigError, FixedBatch, Loader, Pack, PreprocessError, PretrainCollator
from tests.contract.cases import (
    EVERY_HOST,
    INLINE,
    PROCESSES,
    THREAD_HOST,
    THREADS,
    Numbers,
    Options,
    all_facts,
    bad_at_15,
    collate,
    documents,
    drain,
    facts,
    name_of,
    numbers,
    some_or_many,
)


def make(**options: Any) -> Loader:
    return Loader(documents(40), preprocess=some_or_many, batch=Pack(16, rows=2), collate=PretrainCollator(), **options)


@pytest.fixture(scope="module")
def reference() -> list[tuple[Any, ...]]:
    with make(**INLINE) as loader:
        return all_facts(loader)


@pytest.mark.parametrize("options", EVERY_HOST.values(), ids=EVERY_HOST)
def test_every_host_gives_the_same_batches_states_and_errors(options: Options, reference: list[tuple[Any, ...]]) -> None:
    with make(**options) as loader:
        assert all_facts(loader) == reference
    with Loader(range(30), preprocess=bad_at_15, batch=FixedBatch(4), collate=collate, **options) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(15))
    assert type(error) is PreprocessError
    assert (error.seq, error.record, error.lane, error.message) == (15, ("sequence", 15), 0, "ValueError: record 15 is bad")


@pytest.mark.parametrize("options", EVERY_HOST.values(), ids=EVERY_HOST)
async def test_async_for_under_asyncio_and_uvloop(options: Options, reference: list[tuple[Any, ...]]) -> None:
    async with make(**options) as loader:
        assert [facts(batch) async for batch in loader] == reference
        assert len([batch async for batch in loader]) == len(reference), "the next pass"


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=name_of)
def test_async_for_under_trio(options: Options, reference: list[tuple[Any, ...]]) -> None:
    async def main() -> list[tuple[Any, ...]]:
        async with make(**options) as loader:
            return [facts(batch) async for batch in loader]

    assert trio.run(main) == reference


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
async def test_a_plain_for_inside_a_running_loop(options: Options, reference: list[tuple[Any, ...]]) -> None:
    """K44."""
    with make(**options) as loader:
        assert all_facts(loader) == reference


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
async def test_one_iterator_for_both_ways(options: Options, reference: list[tuple[Any, ...]]) -> None:
    with make(**options) as loader:
        iterator = iter(loader)
        mixed = [facts(next(iterator)), facts(await anext(iterator)), facts(next(iterator))]
        mixed += [facts(batch) async for batch in iterator]
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)
    assert mixed == reference


@pytest.mark.parametrize("options", EVERY_HOST.values(), ids=EVERY_HOST)
def test_an_asynchronous_source_everywhere(options: Options) -> None:
    with Loader(Numbers(), preprocess=lambda number: number * 2, batch=FixedBatch(3), collate=collate, **options) as loader:
        assert numbers(loader) == [number * 2 for number in range(30)]


@pytest.mark.parametrize("options", [THREADS, THREAD_HOST], ids=name_of)
def test_a_generator_is_read_by_a_host_in_this_process(options: Options) -> None:
    with Loader((number for number in range(30)), batch=FixedBatch(3), collate=collate, **options) as loader:
        assert numbers(loader) == list(range(30))
        _, error = drain(loader)
        assert type(error) is ConfigError
        assert "a generator can be read once, so pass the function that makes it" in str(error)


class Counting:
    """Counts what was read; for a host in this very process."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Any:
        for number in range(10_000):
            self.num_read += 1
            yield number


async def test_a_step_that_blocks_the_loop_does_not_stop_the_engine() -> None:
    """The trainer's event loop is blocked from the first batch on; afterwards everything is there."""
    source = Counting()
    async with Loader(
        source, preprocess=lambda number: number, batch=FixedBatch(4), collate=collate, buffer_size=64, prefetch_batches=2, **THREADS
    ) as loader:
        iterator = aiter(loader)
        await anext(iterator)
        time.sleep(2)  # noqa: ASYNC251 - a step that blocks is the case
        num_read = source.num_read
        stats = loader.stats()
        assert stats["waiting_batches"] == 2
        assert 64 - 8 < num_read - 4 <= 64, "the buffer is full: less is free than is worth a read"
        assert source.num_read == num_read
        started = time.perf_counter()
        await anext(iterator)
        await anext(iterator)
        assert time.perf_counter() - started < 0.1
        iterator.close()


async def test_a_sidecar_fills_its_buffers_while_the_loop_is_blocked() -> None:
    async with Loader(range(10_000), batch=FixedBatch(4), collate=collate, buffer_size=64, **PROCESSES) as loader:
        iterator = aiter(loader)
        await anext(iterator)
        time.sleep(1)  # noqa: ASYNC251 - a step that blocks is the case
        stats = loader.stats()
        assert 7 <= stats["waiting_batches"] <= 9, "half of the buffer"
        assert 64 - 8 < stats["in_flight"] <= 64
        iterator.close()


async def test_batches_that_are_made_here_leave_room_for_other_tasks() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async with Loader(range(400), batch=FixedBatch(4), collate=collate, **INLINE) as loader:
        task = asyncio.create_task(tick())
        assert len([batch async for batch in loader]) == 100
        task.cancel()
    assert ticks >= 100


async def test_a_loop_gets_its_turn_between_short_steps() -> None:
    """Batches that are there are handed over without one, but for 5 ms at most."""
    num_taken = 0
    taken: list[int] = []

    async def tick() -> None:
        nonlocal num_taken
        while True:
            taken.append(num_taken)
            num_taken = 0
            await asyncio.sleep(0)

    async with Loader(range(400), batch=FixedBatch(4), collate=collate, prefetch_batches=16, buffer_size=200, **THREADS) as loader:
        task = asyncio.create_task(tick())
        iterator = aiter(loader)
        await anext(iterator)
        time.sleep(1)  # noqa: ASYNC251 - meanwhile 16 get ready
        for _ in range(9):
            await anext(iterator)
            num_taken += 1
        await asyncio.sleep(0)
        assert max(taken) > 4, "nine of them take less than 5 ms"
        taken.clear()
        async for _ in iterator:
            num_taken += 1
            time.sleep(0.003)  # noqa: ASYNC251 - a step
        assert 1 <= max(taken) <= 2, "two steps take more than 5 ms"
        task.cancel()


async def test_closing_wakes_a_task_that_waits() -> None:
    def all_but_the_first_never(number: int) -> int:
        time.sleep(60 if number else 0)
        return number

    async with Loader(range(9), preprocess=all_but_the_first_never, batch=FixedBatch(1), collate=collate, **THREAD_HOST) as loader:
        iterator = aiter(loader)
        assert numbers([await anext(iterator)]) == [0]
        waiting = asyncio.ensure_future(anext(iterator))
        await asyncio.sleep(0.05)
        loader.close()
        with pytest.raises(ClosedError, match="expected an open loader, got one that was closed"):
            await asyncio.wait_for(waiting, 1)


def test_a_dataset_for_a_dataloader() -> None:
    with make(**THREADS) as loader:
        whole = [batch["input_ids"].tolist() for batch in loader]
    with make(**PROCESSES) as loader:
        dataset = loader.as_iterable_dataset()
        assert [batch["input_ids"].tolist() for batch in torch.utils.data.DataLoader(dataset, batch_size=None)] == whole
        # DataLoader cannot make a foreign exception again in the trainer and raises its text.
        with pytest.raises(RuntimeError, match=r"ConfigError: DataLoader\(num_workers=\): expected 0 or 1 around an aioloader dataset"):
            list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2))
    gc.collect()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_dataset_for_a_dataloader_with_a_worker_of_its_own() -> None:
    """The worker is forked while this process has an engine running: it starts one of its own, and leaves this one alone."""
    with make(**PROCESSES) as loader:
        whole = [batch["input_ids"].tolist() for batch in loader]
        iterator = iter(loader)
        first = next(iterator)["input_ids"].tolist()
        forked = torch.utils.data.DataLoader(loader.as_iterable_dataset(), batch_size=None, num_workers=1)
        assert [batch["input_ids"].tolist() for batch in forked] == whole
        assert [first, *(batch["input_ids"].tolist() for batch in iterator)] == whole


def test_two_loaders_at_once(reference: list[tuple[Any, ...]]) -> None:
    with make(**PROCESSES) as first, make(**THREADS) as second:
        pairs = [(facts(one), facts(other)) for one, other in zip(first, second, strict=True)]
    assert [one for one, _ in pairs] == reference
    assert [other for _, other in pairs] == reference


def test_an_iterator_ends_when_a_newer_one_is_made() -> None:
    with make(**THREADS) as loader:
        old = iter(loader)
        next(old)
        new = iter(loader)
        with pytest.raises(ClosedError, match="expected the newest iterator of its loader, got one that a newer one replaced"):
            next(old)
        assert next(new).step == 0
        new.close()


def test_a_closed_loader_says_so() -> None:
    loader = make(**THREADS)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    loader.close()
    with pytest.raises(ClosedError, match="expected an open loader"):
        next(iterator)
    with pytest.raises(ClosedError, match="expected an open loader, got one that was closed; make a new one"):
        iter(loader)


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=name_of)
def test_every_stage_counts_what_passes_it(options: Options) -> None:
    with Loader(range(20), batch=FixedBatch(4), collate=collate, **options) as loader:
        assert len(list(loader)) == 5
        counts = {name: stage["count"] for name, stage in loader.stats()["stages"].items()}
    assert counts.pop("order") > 0
    assert counts == {"source": 20, "preprocess": 20, "batch": 20, "bridge": 5}


def leave_by_break(loader: Loader) -> int:
    for batch in loader:
        if batch.step == 9:
            break
    return 10


def leave_by_close(loader: Loader) -> int:
    iterator = iter(loader)
    next(iterator)
    loader.close()
    return 1


def leave_by_an_error(loader: Loader) -> int:
    delivered, error = drain(loader)
    assert type(error) is PreprocessError
    return len(delivered)


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_by_an_error])
@pytest.mark.parametrize("options", EVERY_HOST.values(), ids=EVERY_HOST)
def test_the_last_numbers_of_an_engine_outlive_it(options: Options, leave: Callable[[Loader], int]) -> None:
    with Loader(range(30), preprocess=bad_at_15, batch=FixedBatch(1), collate=collate, **options) as loader:
        num_delivered = leave(loader)
        stats = loader.stats()
        assert stats["workers"] == options["workers"]
        assert stats["delivered_batches"] == num_delivered
        assert num_delivered <= stats["stages"]["batch"]["count"] <= 15
        assert stats["peak_in_flight"] > 0
        assert options == INLINE or stats["worker_restarts"] == 0
    assert loader.stats() == stats


@pytest.mark.parametrize("options", EVERY_HOST.values(), ids=EVERY_HOST)
def test_the_numbers_of_a_whole_pass_outlive_the_engine(options: Options) -> None:
    with Loader(range(20), batch=FixedBatch(4), collate=collate, **options) as loader:
        assert len(list(loader)) == 5
    stats = loader.stats()
    counts = {name: stats["stages"][name]["count"] for name in ("source", "preprocess", "batch", "bridge")}
    assert counts == {"source": 20, "preprocess": 20, "batch": 20, "bridge": 5}


def slow_identity(record: int) -> int:
    time.sleep(0.002)
    return record


@pytest.mark.parametrize("runner", ["asyncio", "trio"])
@pytest.mark.parametrize("prefetch_batches", [1, None])
def test_a_task_that_asks_for_stats_takes_no_batch_from_one_that_waits(runner: str, prefetch_batches: int | None) -> None:
    """It reads the same socket: what it finds there belongs to the other, whose descriptor stays quiet then."""
    delivered: list[int] = []

    async def main() -> None:
        with Loader(
            range(120), preprocess=slow_identity, batch=FixedBatch(2), collate=collate, workers=1, prefetch_batches=prefetch_batches
        ) as loader:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, loader)
                with anyio.fail_after(20):
                    async for batch in loader:
                        delivered.extend(numbers([batch]))
                tasks.cancel_scope.cancel()

    async def ask(loader: Loader) -> None:
        while True:
            assert loader.stats()["delivered_batches"] <= 60
            await anyio.lowlevel.checkpoint()

    anyio.run(main, backend=runner)
    assert delivered == list(range(120))
