"""A pool of worker processes, forked from the zygote. The worker's side is `worker.py`."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
from anyio.abc import TaskGroup

from aioloader.errors import ConfigError, WorkerError
from aioloader.pools.chunk import Block, Chunk, Failure, Outcome
from aioloader.pools.runner import describe_failure
from aioloader.pools.transport import decode, encode, write
from aioloader.pools.worker import BLOCK, CHUNK
from aioloader.runtime.segments import SegmentViews
from aioloader.runtime.signal import Signal
from aioloader.runtime.spawn import ForkClient, describe_exit
from aioloader.runtime.wire import Frame, Wire, WireClosedError

__all__ = ["ProcessPool"]

_CHUNKS_PER_WORKER = 2  # one running, one queued: the next is there when the first is done
_EXIT_TIMEOUT_S = 1.0


class ProcessPool:
    """Runs chunks in `num_workers` processes; the next chunk goes to the least loaded one."""

    def __init__(self, forks: ForkClient, num_workers: int, preprocess: bytes) -> None:
        self.num_workers = num_workers
        self.capacity = num_workers * _CHUNKS_PER_WORKER
        self._forks = forks
        self._preprocess = preprocess
        self._workers: list[_Worker] = []
        self._error: Exception | None = None
        self._changed = Signal()

    async def start(self, tasks: TaskGroup) -> None:
        """Fork the workers; returns when all are started. Their receivers run in `tasks`."""
        failure = await self._forks.prepare(self._preprocess)
        if failure is not None:
            self._fail(
                ConfigError(
                    "Loader(preprocess=)",
                    expected="a function that a worker process can load",
                    got=f"an error while loading it:\n{failure}",
                    do="make the modules it needs importable there",
                )
            )
            return
        for number in range(self.num_workers):
            worker = await self._fork(number)
            self._workers.append(worker)
            self._notify()
            tasks.start_soon(self._receive, worker)

    async def run(self, chunk: Chunk) -> Block:
        """Preprocess a chunk. A cancelled caller leaves it running; its block is thrown away.

        Raises:
            WorkerError: The worker died.
        """
        worker = await self._least_loaded()
        try:
            encoded = encode(chunk.records)
        except Exception:  # noqa: BLE001 - a foreign __reduce__ may raise anything; found again below, record by record
            return await self._run_movable(chunk)
        number = worker.next_number
        worker.next_number += 1
        pending = worker.pending[number] = _Pending()
        try:
            body = memoryview(bytearray(encoded.nbytes))
            write(encoded, body)
            returned = worker.returned[:]
            del worker.returned[: len(returned)]  # the same list goes on: views made earlier add to it when they are gone
            meta = pickle.dumps((number, chunk.epoch, chunk.ids, encoded.sizes, returned))
            try:
                await worker.wire.send_async(CHUNK, meta, [body])
            except WireClosedError:
                pass  # its receiver finds out as well, and says how it died
            except BaseException:
                worker.returned.extend(returned)  # cancelled before anything was sent
                raise
            await pending.done.wait()
        finally:
            worker.pending.pop(number, None)
            self._notify()
        if pending.block is None:
            assert worker.error is not None
            raise worker.error
        return pending.block

    async def _run_movable(self, chunk: Chunk) -> Block:
        """Run the records before the first one that cannot move to a worker; on that one the chunk fails."""
        index, failure = _first_unmovable(chunk.records)
        block = Block(Outcome(0, [], [], None), "none", 0.0)
        if index:
            block = await self.run(Chunk(chunk.epoch, chunk.records[:index], chunk.ids[:index]))
        if block.outcome.failure is not None:
            return block
        return replace(block, outcome=block.outcome._replace(failure=failure))

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.pid for worker in self._workers]

    async def aclose(self) -> None:
        """Kill the workers; their memory stays valid where it is still viewed."""
        for worker in self._workers:
            await self._forks.kill(worker.pid)
            await worker.wire.aclose()
            worker.views.close()

    async def _fork(self, number: int) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            name = f"aioloader-w{number}"
            pid = await self._forks.fork("aioloader.pools.worker:main", name, b"", [theirs.fileno()])
        return _Worker(f"{number}", pid, Wire(ours))

    async def _least_loaded(self) -> _Worker:
        while True:
            if self._error is not None:
                raise self._error
            if self._workers:
                worker = min(self._workers, key=_load)
                if _load(worker) < _CHUNKS_PER_WORKER:
                    return worker
            await self._changed.wait()

    async def _receive(self, worker: _Worker) -> None:
        try:
            while True:
                self._settle(worker, await worker.wire.receive_async())
        except (WireClosedError, ValueError):
            exitcode = await self._forks.exit_of(worker.pid, _EXIT_TIMEOUT_S)
            self._lose(
                worker,
                WorkerError(
                    f"expected worker {worker.name} (pid {worker.pid}) to run until the loader closes, but it {describe_exit(exitcode)} "
                    f"while it held {len(worker.pending)} chunk(s); look for the out-of-memory killer or a crash in native code",
                    pid=worker.pid,
                    exitcode=exitcode,
                    worker=worker.name,
                ),
            )

    def _settle(self, worker: _Worker, frame: Frame) -> None:
        assert frame.kind == BLOCK
        number, num_done, counts, failure, service_s, sizes, where, retired = pickle.loads(frame.meta)
        for segment in retired:
            worker.views.forget(segment)
        memory, nbytes = frame.body, len(frame.body)
        if where is not None:
            segment, segment_bytes, nbytes = where
            if frame.descriptors:
                worker.views.attach(segment, frame.descriptors[0], segment_bytes)
            memory = worker.views.view(segment, nbytes, self._returner(worker)).data
        pending = worker.pending.get(number)
        if pending is not None:
            try:
                outcome = Outcome(num_done, counts, decode(sizes, memory), failure)
            except Exception as error:  # noqa: BLE001 - a foreign __setstate__ may raise anything
                outcome = Outcome(0, [], [], describe_failure(error))
            pending.block = Block(outcome, f"{worker.name} (pid {worker.pid})", service_s, nbytes)
            pending.done.set()

    def _returner(self, worker: _Worker) -> Callable[[int], None]:
        """Return what is called, maybe in the middle of anything, when the last view of a segment is gone."""
        return worker.returned.append

    def _lose(self, worker: _Worker, error: WorkerError) -> None:
        """Fail the chunks of a dead worker and all that come later; what other workers hold may stand before them in order."""
        worker.error = error
        for pending in worker.pending.values():
            pending.done.set()
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._notify()

    def _notify(self) -> None:
        self._changed.notify()


class _Pending:
    """A chunk that a worker holds."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.block: Block | None = None


class _Worker:
    """The engine's view of one worker process."""

    def __init__(self, name: str, pid: int, wire: Wire) -> None:
        self.name = name
        self.pid = pid
        self.wire = wire
        self.pending: dict[int, _Pending] = {}
        self.next_number = 0
        self.error: WorkerError | None = None
        self.views = SegmentViews()
        self.returned: list[int] = []


def _first_unmovable(records: Sequence[Any]) -> tuple[int, Failure]:
    for index, record in enumerate(records):
        try:
            encode([record])
        except Exception as error:  # noqa: BLE001 - a foreign __reduce__ may raise anything
            return index, describe_failure(error)
    raise RuntimeError("records could not be encoded together but could one by one")


def _load(worker: _Worker) -> int:
    return len(worker.pending)
