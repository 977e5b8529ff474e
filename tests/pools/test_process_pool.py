"""Worker processes: deaths, shared memory, what can and cannot move, and random numbers that belong to the record."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from aioloader.errors import WorkerError
from aioloader.pools.chunk import Block, Outcome
from aioloader.pools.processes import ProcessPool
from aioloader.pools.recovery import RecoveryOptions
from aioloader.pools.rng import SwappedSeeding
from aioloader.pools.runner import Preprocess, Runner
from aioloader.runtime.spawn import ZygoteProcess
from aioloader.testing.leaks import resources
from tests.pools import pool_cases
from tests.pools.pool_cases import Pool, chunk_of, in_pool, outcomes


async def test_workers_are_forked_named_and_without_threads(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> tuple[list[Outcome], list[int]]:
        return await outcomes(pool, [chunk_of([1])] * 8), pool.pids

    results, pids = await in_pool("process", zygote, Preprocess(function=pool_cases.process_facts), body)
    facts = {outcome.samples[0] for outcome in results}
    assert {pid for pid, _, _ in facts} <= set(pids)
    assert {name for _, name, _ in facts} <= {"aioloader-w0", "aioloader-w1"}
    assert {threads for _, _, threads in facts} == {1}
    assert len(set(pids)) == 2


async def test_a_worker_that_needs_no_torch_has_none(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> Outcome:
        return (await pool.run(chunk_of([1]))).outcome

    assert (await in_pool("process", zygote, Preprocess(function=pool_cases.has_torch), body)).samples == [False]


async def test_the_next_chunk_goes_to_the_least_loaded_worker(zygote: ZygoteProcess, tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    async def body(pool: Pool) -> list[str]:
        workers: list[str] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run, chunk_of([pipe]))
            await wait_all_tasks_blocked()
            for _ in range(6):
                workers.append((await pool.run(chunk_of(["/dev/null"]))).worker)
            await anyio.to_thread.run_sync(Path(pipe).write_text, "go")
        return workers

    assert len(set(await in_pool("process", zygote, Preprocess(function=pool_cases.block_on), body))) == 1


async def test_a_worker_holds_one_running_and_one_queued_chunk(zygote: ZygoteProcess, tmp_path: Path) -> None:
    """The others wait where any worker can still get them."""
    pipes = [str(tmp_path / name) for name in "ab"]
    for pipe in pipes:
        os.mkfifo(pipe)
    loads: list[list[int]] = []

    async def body(pool: Pool) -> list[Outcome]:
        assert isinstance(pool, ProcessPool)
        results: list[Outcome] = []

        async def run(record: str) -> None:
            results.append((await pool.run(chunk_of([record]))).outcome)
            loads.append([len(worker.pending) for worker in pool._workers])

        async with anyio.create_task_group() as tasks:
            for record in [*pipes, *["/dev/null"] * 9]:
                tasks.start_soon(run, record)
            await wait_all_tasks_blocked()
            loads.append([len(worker.pending) for worker in pool._workers])
            for pipe in pipes:
                await anyio.to_thread.run_sync(Path(pipe).write_text, "go")
        return results

    results = await in_pool("process", zygote, Preprocess(function=pool_cases.block_on), body)
    assert len(results) == 11
    assert loads[0] == [2, 2]
    assert max(map(max, loads)) == 2


async def test_workers_start_side_by_side(zygote: ZygoteProcess, tmp_path: Path) -> None:
    """Each makes its own object when it starts; here none is done before all have begun."""

    async def body(pool: Pool) -> tuple[list[Outcome], list[int]]:
        return await outcomes(pool, [chunk_of([number]) for number in range(8)]), pool.pids

    preprocess = Preprocess(function=pool_cases.with_own, worker_init=pool_cases.Meeting(tmp_path, 4))
    results, pids = await in_pool("process", zygote, preprocess, body, num_workers=4)
    assert {outcome.samples[0] for outcome in results} == set(pids)


async def test_a_worker_keeps_the_pages_of_large_buffers(zygote: ZygoteProcess) -> None:
    """Given back to the system, 32 MiB are 8,192 faults, for each record anew."""

    async def body(pool: Pool) -> Outcome:
        return (await pool.run(chunk_of([20]))).outcome

    outcome = await in_pool("process", zygote, Preprocess(function=pool_cases.page_faults_of_large_buffers), body, num_workers=1)
    assert outcome.samples[0] < 1000


# Deaths

UNFORGIVING = RecoveryOptions(max_restarts_per_minute=0)


@pytest.mark.parametrize(
    ("how", "exitcode", "words"),
    [
        ("exit 0", 0, "left with exit code 0"),
        ("exit 3", 3, "left with exit code 3"),
        ("SIGKILL", -9, "was killed by SIGKILL"),
        ("SIGSEGV", -11, "was killed by SIGSEGV"),
        ("SIGTERM", -15, "was killed by SIGTERM"),
    ],
)
async def test_a_worker_that_dies_is_an_error_that_says_how(zygote: ZygoteProcess, how: str, exitcode: int, words: str) -> None:
    async def body(pool: Pool) -> tuple[list[WorkerError], list[int]]:
        errors = []
        for records in (["fine", how], ["fine"]):
            message = rf"expected worker \d \(pid \d+\) to run until the loader closes, but it {words}"
            with pytest.raises(WorkerError, match=message) as caught:
                await pool.run(chunk_of(records))
            errors.append(caught.value)
        return errors, pool.pids

    errors, pids = await in_pool("process", zygote, Preprocess(function=pool_cases.die), body, recovery=UNFORGIVING)
    assert errors[0] is errors[1]
    assert errors[0].exitcode == exitcode
    assert errors[0].pid in pids
    assert errors[0].worker in ("0", "1")
    assert isinstance(pickle.loads(pickle.dumps(errors[0])), WorkerError)


async def test_all_that_a_dead_worker_held_fails_and_what_others_hold_arrives(zygote: ZygoteProcess, tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    results: dict[str, Block | WorkerError] = {}

    async def body(pool: Pool) -> None:
        died = anyio.Event()

        async def run(name: str, record: str) -> None:
            try:
                results[name] = await pool.run(chunk_of([record]))
            except WorkerError as error:
                results[name] = error
                died.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "slow", f"block {pipe}")
            await wait_all_tasks_blocked()
            tasks.start_soon(run, "dies", "SIGKILL")
            await died.wait()
            await anyio.to_thread.run_sync(Path(pipe).write_text, "go")

    await in_pool("process", zygote, Preprocess(function=pool_cases.die_or_block), body, recovery=UNFORGIVING)
    assert isinstance(results["dies"], WorkerError)
    assert isinstance(results["slow"], Block)
    assert results["slow"].outcome.samples == ["go"]


async def test_a_dead_worker_is_replaced_and_its_records_run_again(zygote: ZygoteProcess, tmp_path: Path) -> None:
    deadly = [str(tmp_path / name) for name in "abc"]
    chunks = [chunk_of(["x", deadly[0], "y", deadly[1]]), chunk_of(["z"]), chunk_of([deadly[2]]), *[chunk_of(["more"])] * 5]

    async def body(pool: Pool) -> tuple[list[Outcome], int, set[int]]:
        before = set(pool.pids)
        return await outcomes(pool, chunks), pool.num_restarts, before & set(pool.pids)

    results, num_restarts, remaining = await in_pool("process", zygote, Preprocess(function=pool_cases.die_once), body)
    assert [list(outcome.samples) for outcome in results[:3]] == [["x", "survived", "y", "survived"], ["z"], ["survived"]]
    assert [outcome.samples for outcome in results[3:]] == [["more"]] * 5
    assert all(outcome.failure is None for outcome in results)
    assert num_restarts == 3
    assert len(remaining) < 2


@pytest.mark.parametrize("max_bytes", [0, 2, 100])
async def test_what_a_dead_worker_left_is_run_again_only_as_far_as_samples_may_take(
    zygote: ZygoteProcess, tmp_path: Path, max_bytes: int
) -> None:
    """What is not run comes in another chunk."""
    deadly = [str(tmp_path / name) for name in "abc"]
    records = ["x", "y", deadly[0], "z", deadly[1], deadly[2], "end"]

    async def body(pool: Pool) -> list[str]:
        samples: list[str] = []
        chunk = chunk_of(records)._replace(max_bytes=max_bytes * 64)
        while chunk.records:
            outcome = (await pool.run(chunk)).outcome
            assert (outcome.failure, outcome.num_done) == (None, len(outcome.samples))
            assert outcome.num_done > 0
            samples += outcome.samples
            chunk = chunk.split(outcome.num_done)[1]
        return samples

    samples = await in_pool("process", zygote, Preprocess(function=pool_cases.die_once), body)
    assert samples == ["x", "y", "survived", "z", "survived", "survived", "end"]


async def test_a_record_that_kills_every_worker_fails_in_its_place(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> tuple[list[Outcome], int]:
        return await outcomes(pool, [chunk_of(["a", "b", "SIGKILL", "c"]), *[chunk_of(["fine"])] * 6]), pool.num_restarts

    recovery = RecoveryOptions(max_kills=2)
    (poisoned, *others), num_restarts = await in_pool("process", zygote, Preprocess(function=pool_cases.die), body, recovery=recovery)
    assert (poisoned.num_done, list(poisoned.samples)) == (2, ["a", "b"])
    assert poisoned.failure is not None
    assert poisoned.failure.kind == "WorkerError"
    assert "was killed by SIGKILL" in poisoned.failure.message
    assert isinstance(poisoned.failure.error, WorkerError)
    assert [outcome.samples for outcome in others] == [["fine"]] * 6
    assert num_restarts == 2


async def test_too_many_deaths_end_it(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> None:
        with pytest.raises(WorkerError, match=r"expected at most 2 such deaths within a minute; .* raise max_restarts_per_minute"):
            await outcomes_one(pool, ["SIGKILL"])
        with pytest.raises(WorkerError, match="expected at most 2 such deaths"):
            await outcomes_one(pool, ["fine"])

    recovery = RecoveryOptions(max_kills=9, max_restarts_per_minute=2)
    await in_pool("process", zygote, Preprocess(function=pool_cases.die), body, recovery=recovery)


async def outcomes_one(pool: Pool, records: list[str]) -> Outcome:
    return (await pool.run(chunk_of(records))).outcome


async def test_a_worker_that_makes_no_progress_is_killed_and_blamed(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> Outcome:
        return await outcomes_one(pool, ["a", "SIGSTOP", "b"])

    recovery = RecoveryOptions(max_kills=1, timeout_s=0.2)
    outcome = await in_pool("process", zygote, Preprocess(function=pool_cases.die), body, recovery=recovery)
    assert (outcome.num_done, list(outcome.samples)) == (1, ["a"])
    assert outcome.failure is not None
    assert "made no progress for 0.2 s and was killed" in outcome.failure.message


async def test_a_stopped_worker_does_not_hold_up_closing(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(pool.run, chunk_of(["SIGSTOP"]))
            await wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()

    with anyio.fail_after(5):
        await in_pool("process", zygote, Preprocess(function=pool_cases.die), body)


async def test_a_large_chunk_for_a_blocked_worker_does_not_hold_up_closing(zygote: ZygoteProcess, tmp_path: Path) -> None:
    """Half a chunk is in the socket, the worker will never read the rest, and half a frame is never abandoned."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    async def body(pool: Pool) -> None:
        pool_tasks.start_soon(pool.run, chunk_of([(pipe, b"")]))
        await wait_all_tasks_blocked()
        pool_tasks.start_soon(pool.run, chunk_of([(pipe, bytes(8 << 20))]))
        await wait_all_tasks_blocked()
        pool_tasks.cancel_scope.cancel()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as pool_tasks:
            await in_pool("process", zygote, Preprocess(function=pool_cases.block_on_first), body, num_workers=1)


# Shared memory


async def test_large_samples_come_through_shared_memory_that_is_used_again(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> tuple[int, list[int]]:
        counts = []
        for number in range(30):
            block = await pool.run(chunk_of([number] * 10))
            assert block.nbytes > 900_000
            assert all((sample["pixels"] == number).all() and sample["record"] == number for sample in block.outcome.samples)
            del block
            counts.append(len(resources().descriptors))
        assert isinstance(pool, ProcessPool)
        return sum(len(worker.views) for worker in pool._workers), counts

    num_segments, counts = await in_pool("process", zygote, Preprocess(function=pool_cases.large), body, num_workers=1)
    assert num_segments <= 3
    assert len(set(counts)) == 1


async def test_samples_in_hand_keep_their_memory(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> list[Any]:
        held = []
        for number in range(8):
            held.append((await pool.run(chunk_of([number] * 10))).outcome.samples[4]["pixels"][10:12])
            for other in range(3):
                await pool.run(chunk_of([100 + other] * 10))
        return held

    held = await in_pool("process", zygote, Preprocess(function=pool_cases.large), body)
    assert [view.min() for view in held] == [view.max() for view in held] == list(range(8))


async def test_large_records_go_out_and_come_back(zygote: ZygoteProcess) -> None:
    records = [bytes([number]) * 3_000_000 for number in range(5)]

    async def body(pool: Pool) -> list[Outcome]:
        return await outcomes(pool, [chunk_of(records), chunk_of(records[:1]), chunk_of(records)])

    results = await in_pool("process", zygote, Preprocess(function=pool_cases.passed_on), body)
    assert [list(outcome.samples) for outcome in results] == [records, records[:1], records]


# What can and cannot move


async def test_functions_and_classes_of_ones_own_travel_by_value(zygote: ZygoteProcess) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    def work(record: Local) -> Local:
        return Local(record.value * 2)

    async def body(pool: Pool) -> Outcome:
        return (await pool.run(chunk_of([Local(3), Local(4)]))).outcome

    outcome = await in_pool("process", zygote, Preprocess(function=work), body)
    assert [sample.value for sample in outcome.samples] == [6, 8]
    assert all(isinstance(sample, Local) for sample in outcome.samples)


async def test_an_error_class_of_ones_own_arrives_as_what_it_is(zygote: ZygoteProcess) -> None:
    class BadError(Exception):
        pass

    def work(_record: int) -> None:
        raise BadError("very")

    async def body(pool: Pool) -> Outcome:
        return (await pool.run(chunk_of([1]))).outcome

    failure = (await in_pool("process", zygote, Preprocess(function=work), body)).failure
    assert failure is not None
    assert isinstance(failure.error, BadError)
    assert str(failure.error) == "very"


async def test_an_error_that_cannot_move_is_there_as_text(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> Outcome:
        return (await pool.run(chunk_of([1]))).outcome

    failure = (await in_pool("process", zygote, Preprocess(function=pool_cases.fail_stubbornly), body)).failure
    assert failure is not None
    assert (failure.kind, failure.message, failure.error) == ("StubbornError", "1 and 2", None)
    assert "in fail_stubbornly" in failure.traceback


async def test_a_sample_that_cannot_leave_its_worker_fails_its_record(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> list[Outcome]:
        return await outcomes(pool, [chunk_of(list(range(6))), chunk_of([7])])

    failed, fine = await in_pool("process", zygote, Preprocess(function=pool_cases.unsendable_at_three), body)
    assert (failed.num_done, failed.samples) == (3, [0, 1, 2])
    assert failed.failure is not None
    assert (failed.failure.kind, failed.failure.message) == ("OSError", "stays here")
    assert fine.samples == [7]


async def test_a_record_that_cannot_reach_a_worker_fails_in_its_place(zygote: ZygoteProcess) -> None:
    records = [1, 2, pool_cases.Unsendable(), 4]

    async def body(pool: Pool) -> list[Outcome]:
        return await outcomes(pool, [chunk_of(records), chunk_of(records[2:]), chunk_of([5])])

    failed, first, fine = await in_pool("process", zygote, Preprocess(function=pool_cases.passed_on), body)
    assert (failed.num_done, list(failed.samples)) == (2, [1, 2])
    assert (first.num_done, list(first.samples)) == (0, [])
    assert failed.failure is not None
    assert failed.failure.message == "stays here"
    assert fine.samples == [5]


async def test_what_cannot_be_loaded_on_the_other_side_is_a_failure_not_the_end(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> list[Outcome]:
        return await outcomes(pool, [chunk_of([pool_cases.Poisoned(ValueError("bad bytes"))]), chunk_of([7])])

    poisoned, fine = await in_pool("process", zygote, Preprocess(function=pool_cases.passed_on), body)
    assert poisoned.failure is not None
    assert (poisoned.failure.kind, poisoned.failure.message) == ("ValueError", "bad bytes")
    assert fine.samples == [7]

    async def back(pool: Pool) -> list[Outcome]:
        return await outcomes(pool, [chunk_of([1]), chunk_of([1])])

    for outcome in await in_pool("process", zygote, Preprocess(function=pool_cases.poisoned), back):
        assert outcome.failure is not None
        assert (outcome.failure.kind, outcome.failure.message) == ("ValueError", "bad bytes")


# Random numbers


@pytest.mark.parametrize("size", [1, 3, 12])
async def test_global_generators_are_seeded_for_each_record(zygote: ZygoteProcess, size: int) -> None:
    preprocess = Preprocess(function=pool_cases.draw_globally, seed=11)
    records = list(range(12))
    expected = Runner(preprocess, SwappedSeeding(11)).run(chunk_of(records, epoch=3)).samples

    async def body(pool: Pool) -> list[Outcome]:
        return await outcomes(pool, [chunk_of(records[at : at + size], epoch=3, first=at) for at in range(0, 12, size)])

    results = await in_pool("process", zygote, preprocess, body)
    assert [sample for outcome in results for sample in outcome.samples] == list(expected)
