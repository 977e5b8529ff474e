"""The engine's main: serves one trainer over one socket, pass after pass, until the trainer closes it."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import time
import traceback
from collections.abc import AsyncIterator

import anyio

from aioloader.engine.channel import END, ERROR, RUN, STATS, TAKEN
from aioloader.engine.outbox import INLINE_BYTES, Outbox
from aioloader.engine.pipeline import Pipeline
from aioloader.engine.plan import Plan, Run
from aioloader.errors import AioLoaderError, HostError
from aioloader.pools.processes import ProcessPool
from aioloader.pools.threads import ThreadPool
from aioloader.runtime.moving import pack_error
from aioloader.runtime.spawn import ForkClient
from aioloader.runtime.wire import Wire, WireClosedError
from aioloader.telemetry.stages import Stages

__all__ = ["serve"]

_FREE_SHARE = 8  # of the memory limit, for shared memory that is kept for reuse: once on the way in, once on the way out


async def serve(plan: Plan, trainer: socket.socket, zygote: socket.socket | None) -> None:
    """Serve the trainer until it closes its end; never raises: what goes wrong is sent to the trainer."""
    wire = Wire(trainer)
    try:
        await _Session(plan, wire, zygote).serve()
    except WireClosedError:
        pass
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        with contextlib.suppress(WireClosedError):
            wire.send(ERROR, pack_error(HostError(f"engine: expected to run until the loader closes, but it failed; report this:\n{text}")))
        if not isinstance(error, Exception):
            raise
    finally:
        wire.close()


class _Session:
    def __init__(self, plan: Plan, wire: Wire, zygote: socket.socket | None) -> None:
        self._plan = plan
        self._wire = wire
        self._zygote = zygote
        self._outbox = Outbox(
            wire,
            plan.prefetch_batches,
            max_free_bytes=plan.memory_limit // _FREE_SHARE,
            inline_bytes=0 if plan.pin_memory else INLINE_BYTES,
        )
        self._stages = Stages()
        self._pipeline: Pipeline | None = None
        self._started_s = time.monotonic()

    async def serve(self) -> None:
        closed = False
        with contextlib.closing(self._outbox):  # once all tasks have ended: one of them may still be putting a micro-batch
            async with anyio.create_task_group() as tasks, self._pool(tasks) as pool:
                try:
                    while True:
                        frame = await self._wire.receive_async()
                        if frame.kind == RUN:
                            tasks.start_soon(self._run, pickle.loads(frame.meta), pool)
                        elif frame.kind == TAKEN:
                            self._outbox.take_back(*pickle.loads(frame.meta))
                        elif frame.kind == STATS:
                            await self._wire.send_async(STATS, pickle.dumps(self._snapshot(pool)))
                except WireClosedError:
                    closed = True
                tasks.cancel_scope.cancel()
        assert closed

    @contextlib.asynccontextmanager
    async def _pool(self, tasks: anyio.abc.TaskGroup) -> AsyncIterator[ProcessPool | ThreadPool]:
        plan = self._plan
        forks = None if self._zygote is None else ForkClient(self._zygote)
        pool: ProcessPool | ThreadPool
        if plan.pool == "thread":
            pool = ThreadPool(plan.num_workers, plan.preprocess)
        else:
            assert forks is not None
            pool = ProcessPool(
                forks,
                plan.num_workers,
                plan.preprocess,
                plan.recovery,
                max_free_bytes=plan.memory_limit // _FREE_SHARE // plan.num_workers,
                cpus=plan.worker_cpus,
            )
        if forks is not None:
            tasks.start_soon(forks.run)
        self._outbox.on_retired = pool.retire
        tasks.start_soon(pool.start, tasks)
        try:
            yield pool
        finally:
            with anyio.CancelScope(shield=True):
                await pool.aclose()
            if forks is not None:
                forks.close()

    async def _run(self, run: Run, pool: ProcessPool | ThreadPool) -> None:
        """Run one pass and say how it ended."""
        following: Run | None = run
        if self._pipeline is None:
            self._started_s = time.monotonic()
        try:
            while following is not None:
                pipeline = self._pipeline = Pipeline(self._plan, following, pool, self._outbox, self._stages)
                self._outbox.budget = pipeline.budget
                state = await pipeline.run()
                following = pipeline.following(state)
        except AioLoaderError as error:
            await self._outbox.flush()
            await self._wire.send_async(ERROR, pack_error(error), [pickle.dumps(self._snapshot(pool))])
        else:
            await self._outbox.flush()
            await self._wire.send_async(END, json.dumps(state).encode(), [pickle.dumps(self._snapshot(pool))])

    def _snapshot(self, pool: ProcessPool | ThreadPool) -> dict[str, object]:
        budget = None if self._pipeline is None else self._pipeline.budget
        if budget is not None:
            budget.note_peaks()
        stages = self._stages.snapshot(time.monotonic() - self._started_s)
        preprocess = stages["preprocess"]
        return {
            "stages": stages,
            "mean_preprocess_s": preprocess["service_s"] / max(1, preprocess["count"]),
            "worker_idle_fraction": max(0.0, 1 - preprocess["occupancy"] / max(1, pool.num_workers)),
            "in_flight": 0 if budget is None else budget.slots.in_flight,
            "peak_in_flight": 0 if budget is None else budget.slots.peak,
            "buffer_size": self._plan.buffer_size if budget is None else budget.slots.limit,
            "in_flight_bytes": 0 if budget is None else budget.in_flight_bytes,
            "buffered_bytes": 0 if budget is None else budget.buffered_bytes,
            "peak_in_flight_bytes": 0 if budget is None else budget.peak_bytes,
            "memory_limit": self._plan.memory_limit,
            "stored_batches": 0 if self._pipeline is None else self._pipeline.overflow.total,
            "stored_bytes": 0 if self._pipeline is None else self._pipeline.overflow.nbytes,
            "waiting_batches": self._outbox.num_waiting,
            "workers": pool.num_workers,
            "worker_pids": pool.pids,
            "worker_restarts": pool.num_restarts,
        }
