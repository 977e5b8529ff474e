"""What every pool promises: the results of running inline, failures in their place, nothing left at the end."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from aioloader.errors import ConfigError
from aioloader.pools.chunk import Block, Outcome
from aioloader.pools.rng import SwappedSeeding
from aioloader.pools.runner import Preprocess, Runner
from aioloader.runtime.spawn import ZygoteProcess
from tests.pools import pool_cases
from tests.pools.pool_cases import KINDS, Pool, chunk_of, in_pool, outcomes

every_pool = pytest.mark.parametrize("kind", KINDS)


def inline(preprocess: Preprocess, records: list[Any], *, epoch: int = 0, first: int = 0) -> Outcome:
    return Runner(preprocess, SwappedSeeding(preprocess.seed)).run(chunk_of(records, epoch=epoch, first=first))


def plain(outcome: Outcome) -> tuple[int, list[int], list[Any]]:
    counts = [1] * outcome.num_done if outcome.counts is None else list(outcome.counts)
    return outcome.num_done, counts, list(outcome.samples)


@every_pool
@pytest.mark.parametrize("name", ["double", "repeat", "keep_even", "draw"])
async def test_results_are_those_of_running_inline(kind: str, zygote: ZygoteProcess, name: str) -> None:
    preprocess = Preprocess(function=getattr(pool_cases, name), seed=7)
    sizes = [1, 2, 50, 1, 7, 0, 30, 3, 1, 1]
    chunks, first = [], 0
    for number, size in enumerate(sizes):
        chunks.append(chunk_of(list(range(first, first + size)), epoch=number % 2, first=first))
        first += size

    async def body(pool: Pool) -> list[Outcome]:
        return await outcomes(pool, chunks)

    results = await in_pool(kind, zygote, preprocess, body)
    for chunk, outcome in zip(chunks, results, strict=True):
        assert outcome.failure is None
        expected = Runner(preprocess, SwappedSeeding(7)).run(chunk)
        assert plain(outcome) == plain(expected)


@every_pool
async def test_no_function_passes_records_through(kind: str, zygote: ZygoteProcess) -> None:
    records = [{"a": 1}, None, [1, 2], "text", b"bytes"]

    async def body(pool: Pool) -> Outcome:
        return (await pool.run(chunk_of(records))).outcome

    outcome = await in_pool(kind, zygote, Preprocess(function=None), body)
    assert plain(outcome) == (5, [1] * 5, records)


@every_pool
async def test_a_failure_keeps_its_place(kind: str, zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> tuple[Any, Outcome]:
        block = await pool.run(chunk_of(list(range(6))))
        return block, (await pool.run(chunk_of([8, 9]))).outcome

    block, after = await in_pool(kind, zygote, Preprocess(function=pool_cases.fail_at), body)
    assert plain(block.outcome) == (3, [1, 1, 1], [0, 1, 2])
    failure = block.outcome.failure
    assert (failure.kind, failure.message) == ("LookupError", "record 3 is bad")
    assert "in fail_at" in failure.traceback
    assert "aioloader/pools/runner.py" not in failure.traceback
    assert type(failure.error) is LookupError
    assert block.service_s > 0
    assert block.worker
    assert plain(after) == (2, [1, 1], [8, 9])


@every_pool
async def test_records_that_were_not_run_took_nothing_yet(kind: str, zygote: ZygoteProcess) -> None:
    """They come again, and would count twice."""
    records = [bytes([number]) * 50_000 for number in range(10)]

    async def body(pool: Pool) -> list[Block]:
        return [await pool.run(chunk_of(records)), await pool.run(chunk_of(records)._replace(max_bytes=120_000))]

    whole, stopped = await in_pool(kind, zygote, Preprocess(function=pool_cases.passed_on), body)
    assert (whole.outcome.num_done, stopped.outcome.num_done) == (10, 3)
    assert whole.raw_nbytes >= 500_000
    assert stopped.raw_nbytes == pytest.approx(0.3 * whole.raw_nbytes, rel=0.01)


@every_pool
@pytest.mark.parametrize("name", list(pool_cases.ERRORS))
async def test_whatever_a_function_raises_is_a_failure_of_its_record(kind: str, zygote: ZygoteProcess, name: str) -> None:
    async def body(pool: Pool) -> list[Outcome]:
        return await outcomes(pool, [chunk_of(["fine", name, "never"]), chunk_of(["fine"])])

    failed, fine = await in_pool(kind, zygote, Preprocess(function=pool_cases.raise_named), body)
    assert plain(failed) == (1, [1], ["fine"])
    assert failed.failure is not None
    assert failed.failure.kind == type(pool_cases.ERRORS[name]).__name__
    assert plain(fine) == (1, [1], ["fine"])


@every_pool
async def test_columns_in_and_out(kind: str, zygote: ZygoteProcess) -> None:
    preprocess = Preprocess(function=pool_cases.columns, batched=True)
    records = [{"number": 2}, {"number": 0}, {"number": 1}]

    async def body(pool: Pool) -> Outcome:
        return (await pool.run(chunk_of(records))).outcome

    outcome = await in_pool(kind, zygote, preprocess, body)
    assert plain(outcome) == plain(inline(preprocess, records))
    assert plain(outcome)[1] == [2, 0, 1]


@every_pool
async def test_every_worker_has_an_object_of_its_own(kind: str, zygote: ZygoteProcess) -> None:
    preprocess = Preprocess(function=pool_cases.count, worker_init=pool_cases.Counter)

    async def body(pool: Pool) -> list[Outcome]:
        return await outcomes(pool, [chunk_of([number] * 20) for number in range(20)])

    results = await in_pool(kind, zygote, preprocess, body, num_workers=3)
    places: dict[tuple[int, int], list[int]] = {}
    for outcome in results:
        for _, place, count in outcome.samples:
            places.setdefault(place, []).append(count)
    assert 1 <= len(places) <= 3
    assert all(sorted(counts) == list(range(1, len(counts) + 1)) for counts in places.values())
    assert sum(map(len, places.values())) == 400


@every_pool
async def test_a_worker_init_that_fails_is_a_failure_of_the_first_record(kind: str, zygote: ZygoteProcess) -> None:
    preprocess = Preprocess(function=pool_cases.ignore, worker_init=pool_cases.fail_to_start)

    async def body(pool: Pool) -> Outcome:
        return (await pool.run(chunk_of([1, 2]))).outcome

    outcome = await in_pool(kind, zygote, preprocess, body)
    assert outcome.num_done == 0
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.message) == ("OSError", "no model here")


@every_pool
@pytest.mark.parametrize("data", [pickle.dumps(print)[:-5], b"cnot_a_module_of_ours\nfunction\n.", b""], ids=["cut", "missing", "empty"])
async def test_a_function_that_cannot_be_loaded_is_refused(kind: str, zygote: ZygoteProcess, data: bytes) -> None:
    async def body(pool: Pool) -> None:
        for _ in range(3):
            await pool.run(chunk_of([1]))

    with pytest.raises(ExceptionGroup, match="unhandled errors") as caught:
        await in_pool(kind, zygote, data, body)
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError)
    assert f"expected a function that a worker {kind} can load, got an error while loading it" in str(error)
    assert "Traceback" in str(error)


@every_pool
async def test_chunks_may_come_before_the_workers(kind: str, zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> list[Outcome]:
        return await outcomes(pool, [chunk_of([number]) for number in range(10)])

    results = await in_pool(kind, zygote, Preprocess(function=pool_cases.double), body, wait=False)
    assert [outcome.samples for outcome in results] == [[number * 2] for number in range(10)]


@every_pool
async def test_a_cancelled_caller_leaves_the_pool_at_work(kind: str, zygote: ZygoteProcess, tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    async def body(pool: Pool) -> list[Outcome]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run, chunk_of([pipe]))
            await wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        await anyio.to_thread.run_sync(Path(pipe).write_text, "late")
        return await outcomes(pool, [chunk_of(["/dev/null"])] * 10)

    results = await in_pool(kind, zygote, Preprocess(function=pool_cases.block_on), body, num_workers=1)
    assert [outcome.samples for outcome in results] == [[""]] * 10


@every_pool
async def test_no_more_runs_at_once_than_there_are_workers(kind: str, zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> int:
        await outcomes(pool, [chunk_of(list(range(50)))] * 30)
        return pool.capacity

    assert await in_pool(kind, zygote, Preprocess(function=pool_cases.double), body, num_workers=3) >= 3


@every_pool
async def test_closing_leaves_nothing_even_in_the_middle_of_work(kind: str, zygote: ZygoteProcess, tmp_path: Path) -> None:
    """What is left is found by the check around every test."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    async def body(pool: Pool) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(pool.run, chunk_of([pipe]))
            await wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        if kind == "thread":  # a thread cannot be killed: end what it waits for
            await anyio.to_thread.run_sync(Path(pipe).write_text, "end")

    await in_pool(kind, zygote, Preprocess(function=pool_cases.block_on), body, num_workers=1)


@every_pool
@pytest.mark.parametrize("num_checkpoints", range(6))
async def test_closing_while_starting_leaves_nothing(kind: str, zygote: ZygoteProcess, num_checkpoints: int) -> None:
    """What is left is found by the check around every test."""

    async def body(_pool: Pool) -> None:
        for _ in range(num_checkpoints):
            await anyio.lowlevel.checkpoint()

    await in_pool(kind, zygote, Preprocess(function=pool_cases.double), body, wait=False)
