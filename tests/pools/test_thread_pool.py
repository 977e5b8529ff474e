"""Worker threads: one process, one copy of everything each."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
from anyio import wait_all_tasks_blocked

from aioloader.pools.chunk import Outcome
from aioloader.pools.runner import Preprocess
from aioloader.runtime.spawn import ZygoteProcess
from tests.pools import pool_cases
from tests.pools.pool_cases import Pool, chunk_of, in_pool, outcomes


class Marked:
    """A function that can tell its copies apart."""

    def __call__(self, _record: int) -> int:
        return id(self)


async def test_every_thread_has_a_copy_of_the_function(zygote: ZygoteProcess) -> None:
    function = Marked()

    async def body(pool: Pool) -> list[Outcome]:
        return await outcomes(pool, [chunk_of([1]) for _ in range(50)])

    results = await in_pool("thread", zygote, Preprocess(function=function), body, num_workers=4)
    copies = {outcome.samples[0] for outcome in results}
    assert 1 <= len(copies) <= 4
    assert id(function) not in copies


async def test_runs_in_this_process(zygote: ZygoteProcess) -> None:
    async def body(pool: Pool) -> tuple[Outcome, list[int]]:
        return (await pool.run(chunk_of([1]))).outcome, pool.pids

    outcome, pids = await in_pool("thread", zygote, Preprocess(function=pool_cases.process_facts), body)
    assert outcome.samples[0][0] == os.getpid()
    assert pids == []


async def test_a_thread_that_is_busy_is_not_given_another_chunk(zygote: ZygoteProcess, tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    async def body(pool: Pool) -> list[str]:
        workers: list[str] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run, chunk_of([pipe]))
            await wait_all_tasks_blocked()
            for _ in range(4):
                workers.append((await pool.run(chunk_of(["/dev/null"]))).worker)
            await anyio.to_thread.run_sync(Path(pipe).write_text, "go")
        return workers

    assert len(set(await in_pool("thread", zygote, Preprocess(function=pool_cases.block_on), body))) == 1


async def test_the_thread_of_a_cancelled_call_is_busy_until_it_is_done(zygote: ZygoteProcess, tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    async def body(pool: Pool) -> list[str]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run, chunk_of([pipe]))
            await wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            workers = [(await pool.run(chunk_of(["/dev/null"]))).worker for _ in range(4)]
        await anyio.to_thread.run_sync(Path(pipe).write_text, "go")
        return workers

    assert len(set(await in_pool("thread", zygote, Preprocess(function=pool_cases.block_on), body))) == 1
