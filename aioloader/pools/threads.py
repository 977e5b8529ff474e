"""A pool of threads in the engine's host, for functions that release the GIL (fast tokenizers, image decoders, NumPy)."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from aioloader.errors import ConfigError
from aioloader.pools.chunk import Block, Chunk, Outcome
from aioloader.pools.rng import NamedSeeding
from aioloader.pools.runner import Preprocess, Runner
from aioloader.pools.sizes import approximate_nbytes
from aioloader.runtime.threads import CallThread

__all__ = ["ThreadPool"]

_JOIN_TIMEOUT_S = 1.0


class _Worker(NamedTuple):
    number: int
    thread: CallThread
    runner: Runner


class ThreadPool:
    """Runs chunks in `num_workers` threads. Each has a copy of its own of the function and of what `worker_init` makes.

    The global random generators are shared by all threads and not seeded; draw from `record_rng()` instead.
    """

    takes_destinations = False

    def __init__(self, num_workers: int, preprocess: bytes) -> None:
        self.num_workers = num_workers
        self.capacity = num_workers
        self._preprocess = preprocess
        self._threads: list[CallThread] = []
        self._runners: list[Runner] = []
        self._idle: list[_Worker] = []
        self._room = anyio.Semaphore(0)  # rises as threads become ready
        self._error: ConfigError | None = None
        self._is_closed = False

    async def start(self, tasks: TaskGroup) -> None:
        """Start the threads."""
        for number in range(self.num_workers):
            if self._is_closed:  # before this task had its first turn
                return
            thread = CallThread(f"aioloader-t{number}")
            self._threads.append(thread)
            try:
                preprocess: Preprocess = await thread.call(pickle.loads, self._preprocess)
            except Exception as error:  # noqa: BLE001 - user modules may do anything at import
                self._error = ConfigError(
                    "Loader(preprocess=)",
                    expected="a function that a worker thread can load",
                    got=f"an error while loading it:\n{''.join(traceback.format_exception(error))}",
                    do="make the modules it needs importable there",
                )
            else:
                self._runners.append(Runner(preprocess, NamedSeeding(preprocess.seed)))
                self._idle.append(_Worker(number, thread, self._runners[-1]))
            self._room.release()

    async def run(self, chunk: Chunk) -> Block:
        """Preprocess a chunk. A cancelled caller leaves it running; its block is thrown away.

        Raises:
            ConfigError: The function could not be loaded.
        """
        await self._room.acquire()
        if self._error is not None:
            self._room.release()
            raise self._error
        worker = self._idle.pop()
        started = time.perf_counter()
        outcome = await worker.thread.call(self._work, asyncio.get_running_loop(), worker, chunk)
        service_s = time.perf_counter() - started
        raw_nbytes = approximate_nbytes(chunk.records[: outcome.num_done])
        return Block(outcome, f"{worker.number} (thread)", service_s, approximate_nbytes(outcome.samples), raw_nbytes)

    def _work(self, loop: asyncio.AbstractEventLoop, worker: _Worker, chunk: Chunk) -> Outcome:
        """Run a chunk, in its thread. The thread is free when it is done, not when its caller stops waiting."""
        try:
            return worker.runner.run(chunk)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._give_back, worker)

    def _give_back(self, worker: _Worker) -> None:
        self._idle.append(worker)
        self._room.release()

    def retire(self, numbers: Sequence[int]) -> None:
        """Do nothing: threads map no segments."""

    @property
    def held_bytes(self) -> None:
        """Return None: what samples take in this process is only estimated."""
        return None

    @property
    def pids(self) -> list[int]:
        """Return no process ids: threads have none."""
        return []

    async def stacks(self) -> dict[str, str]:
        """Return where each thread stands."""
        frames = sys._current_frames()
        return {
            thread.name: "".join(traceback.format_stack(frames[thread.ident]))
            for thread in threading.enumerate()
            if thread.name.startswith("aioloader-t") and thread.ident in frames
        }

    @property
    def num_restarts(self) -> int:
        """Return 0: threads are not replaced."""
        return 0

    async def aclose(self) -> None:
        """Stop the threads; one that is inside a call of the user's function is a daemon and is left to finish it."""
        self._is_closed = True
        for runner in self._runners:
            runner.stop()
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            await anyio.lowlevel.checkpoint()
            thread.join(_JOIN_TIMEOUT_S)
