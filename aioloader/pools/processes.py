"""A pool of worker processes, forked from the zygote. The worker's side is `worker.py`."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from aioloader.errors import ConfigError, HostError, WorkerError
from aioloader.faults import class_names
from aioloader.pools.chunk import Block, Chunk, Failure, Outcome
from aioloader.pools.handle import Pending, WorkerHandle
from aioloader.pools.progress import ProgressPage
from aioloader.pools.recovery import Blame, RecoveryOptions, RestartBudget, join_blocks, split_chunk
from aioloader.pools.runner import describe_failure
from aioloader.pools.transport import decode, encode, write
from aioloader.pools.worker import BLOCK, CHUNK, REVOKED, pack
from aioloader.runtime.segments import HeldBytes
from aioloader.runtime.signal import Signal
from aioloader.runtime.spawn import ForkClient, describe_exit
from aioloader.runtime.wire import Frame, Wire, WireClosedError
from aioloader.sequences import SampleColumns

__all__ = ["ProcessPool"]

_log = logging.getLogger("aioloader")

_CHUNKS_PER_WORKER = 2  # one running, one queued: the next is there when the first is done
_EXIT_TIMEOUT_S = 1.0
_STACK_WAIT_S = 0.2
_BALANCE_S = 0.02


class ProcessPool:
    """Runs chunks in `num_workers` processes; the next chunk goes to the least loaded one."""

    takes_destinations = True

    def __init__(
        self,
        forks: ForkClient,
        num_workers: int,
        preprocess: bytes,
        recovery: RecoveryOptions,
        *,
        max_free_bytes: int = 1 << 28,
        cpus: Sequence[int] = (),
    ) -> None:
        self.num_workers = num_workers
        self._timeout_s = recovery.timeout_s
        self._blame = Blame(recovery.max_kills)
        self._restarts = RestartBudget(recovery.max_restarts_per_minute)
        self._max_restarts_per_minute = recovery.max_restarts_per_minute
        self.capacity = num_workers * _CHUNKS_PER_WORKER
        self._forks = forks
        self._max_free_bytes = max_free_bytes
        self._cpus = cpus
        self._preprocess = preprocess
        self._workers: list[WorkerHandle] = []
        self._error: Exception | None = None
        self._is_closed = False
        self._changed = Signal()
        self._held = HeldBytes()

    async def start(self, tasks: TaskGroup) -> None:
        """Fork the workers; returns when all are started. Their receivers run in `tasks`. What fails here is raised by `run`."""
        try:
            failure = await self._forks.prepare(pack(self._preprocess))
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
                tasks.start_soon(self._serve, worker)
        except HostError as error:
            self._fail(error)
            return
        if self._timeout_s is not None:
            tasks.start_soon(self._watch, self._timeout_s)
        if self.num_workers > 1:
            tasks.start_soon(self._balance)

    async def run(self, chunk: Chunk) -> Block:
        """Preprocess a chunk. A cancelled caller leaves it running; its block is thrown away.

        Records of a worker that died are run again on others. One that was running at too many deaths fails with `WorkerError`.

        Raises:
            WorkerError: Workers died more often than the restart budget allows.
        """
        worker = await self._least_loaded()
        try:
            encoded = encode(chunk.records)
        except Exception:  # noqa: BLE001 - a foreign __reduce__ may raise anything; found again below, record by record
            return await self._run_movable(chunk)
        number = worker.next_number
        worker.next_number += 1
        pending = worker.pending[number] = Pending(len(chunk.records), encoded.nbytes)
        try:
            body = memoryview(bytearray(encoded.nbytes))
            write(encoded, body)
            returned = worker.returned[:]
            del worker.returned[: len(returned)]  # the same list goes on: views made earlier add to it when they are gone
            target, descriptors = worker.target_of(chunk.destination)
            retired = worker.take_retired()
            meta = pickle.dumps((number, chunk.epoch, chunk.ids, encoded.sizes, chunk.max_bytes, returned, retired, target))
            if chunk.destination is not None:
                worker.destinations[number] = chunk.destination
            try:
                await worker.wire.send_async(CHUNK, meta, [body], descriptors)
                pending.is_sent = True
            except WireClosedError:
                pass  # its receiver finds out as well, and says how it died
            except BaseException:
                worker.returned.extend(returned)  # cancelled before anything was sent
                worker.retired.extend(retired)
                worker.destinations.pop(number, None)
                if target is not None and descriptors:
                    worker.targets.discard(target[0])
                raise
            await pending.done
        finally:
            worker.pending.pop(number, None)
            self._notify()
        if pending.block is not None:
            return pending.block
        return await (self.run(chunk) if pending.death is None else self._run_again(chunk, pending))

    async def _run_again(self, chunk: Chunk, pending: Pending) -> Block:
        """Run the records of a dead worker's chunk again, the one that was running alone, so that blame finds the right one."""
        assert pending.death is not None
        if self._error is not None:
            raise pending.death
        if pending.running is None:
            return await self.run(chunk)
        blocks: list[Block] = []
        suspect = pending.running
        for number, part in enumerate(split_chunk(chunk, suspect)):
            if not part.records:
                continue
            if number == 1 and self._blame.is_poison(part.epoch, part.ids[0]):
                blocks.append(_poisoned(pending.death))
            else:
                blocks.append(await self.run(part))
            if blocks[-1].outcome.num_done < len(part.records):
                break
        return join_blocks(blocks)

    async def _run_movable(self, chunk: Chunk) -> Block:
        """Run the records before the first one that cannot move to a worker; on that one the chunk fails."""
        index, failure = _first_unmovable(chunk.records)
        block = Block(Outcome(0, [], [], None), "none", 0.0)
        if index:
            block = await self.run(chunk.split(index)[0])
        if block.outcome.num_done < index:
            return block
        return block.with_failure(failure)

    def retire(self, numbers: Sequence[int]) -> None:
        """Let the workers forget segments that were destinations."""
        for worker in self._workers:
            worker.retired.extend(number for number in numbers if number in worker.targets)
            worker.targets.difference_update(numbers)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of results that are still in use."""
        return self._held.total

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.pid for worker in self._workers]

    @property
    def num_restarts(self) -> int:
        """Return how many workers died and were replaced."""
        return self._restarts.total

    async def stacks(self) -> dict[str, str]:
        """Return, for each worker, which record it is running since when, and its Python stack."""
        workers = list(self._workers)
        for worker in workers:
            worker.clear_stack()
            await self._forks.kill(worker.pid, signal.SIGUSR1)
        await anyio.sleep(_STACK_WAIT_S)
        return {f"worker {worker.name} (pid {worker.pid})": worker.describe(time.monotonic_ns()) for worker in workers}

    async def aclose(self) -> None:
        """Kill the workers; their memory stays valid where it is still viewed."""
        self._is_closed = True
        for worker in self._workers:
            await self._forks.kill(worker.pid)
            worker.close()

    async def _fork(self, number: int) -> WorkerHandle:
        ours, theirs = socket.socketpair()
        progress = ProgressPage()
        stack = os.memfd_create("aioloader-stack", os.MFD_CLOEXEC)
        try:
            with theirs:
                name = f"aioloader-w{number}"
                payload = pickle.dumps((self._max_free_bytes, self._cpus[number % len(self._cpus)] if self._cpus else None))
                descriptors = [theirs.fileno(), progress.descriptor, stack]
                pid = await self._forks.fork("aioloader.pools.worker:main", name, payload, descriptors)
        except BaseException:
            ours.close()
            progress.close()
            os.close(stack)
            raise
        worker = WorkerHandle(f"{number}", pid, Wire(ours), progress, stack)
        if self._is_closed:  # while the answer was on its way; the zygote ends the process
            worker.close()
            raise HostError("pool: expected to be open until its workers are started, got closed meanwhile; start another loader.")
        return worker

    async def _least_loaded(self) -> WorkerHandle:
        while True:
            if self._error is not None:
                raise self._error
            if self._workers:
                worker = min(self._workers, key=_load)
                if _load(worker) < _CHUNKS_PER_WORKER:
                    return worker
            await self._changed.wait()

    async def _serve(self, worker: WorkerHandle) -> None:
        """Receive a worker's blocks; when it dies, put another in its place."""
        while True:
            try:
                while True:
                    self._settle(worker, await worker.wire.receive_async())
            except (WireClosedError, ValueError):
                exitcode = await self._forks.exit_of(worker.pid, _EXIT_TIMEOUT_S)
            error = _death(worker, exitcode)
            if self._error is None and not self._restarts.take(time.monotonic()):
                self._error = WorkerError(
                    f"{error.message}; expected at most {self._max_restarts_per_minute} such deaths within a minute; "
                    "look for what kills them, or raise max_restarts_per_minute",
                    pid=error.pid,
                    exitcode=exitcode,
                    worker=worker.name,
                )
            if self._error is not None:
                worker.lose(self._error if isinstance(self._error, WorkerError) else error)
                self._notify()
                return
            try:
                replacement = await self._fork(int(worker.name))
            except HostError as failure:
                self._error = failure
                worker.lose(error)
                self._notify()
                return
            _log.warning("%s; worker %s (pid %d) takes over, its records are run again", error.message, worker.name, replacement.pid)
            self._workers[self._workers.index(worker)] = replacement
            worker.lose(error)
            worker.close()
            worker = replacement
            self._notify()

    async def _watch(self, timeout_s: float) -> None:
        """Kill workers that make no progress: endless work, or stopped from outside."""
        while True:
            await anyio.sleep(min(0.25, timeout_s / 4))
            now_ns = time.monotonic_ns()
            for worker in list(self._workers):
                if worker.pending and worker.silent_s(now_ns) > timeout_s and worker.timed_out_s is None:
                    worker.timed_out_s = timeout_s
                    await self._forks.kill(worker.pid)

    async def _balance(self) -> None:
        """Give chunks that wait behind a slow one to workers that have nothing to do."""
        while True:
            await anyio.sleep(_BALANCE_S)
            num_idle = sum(not worker.pending for worker in self._workers)
            for worker in self._workers if num_idle else ():
                if num_idle and worker.revoke_queued(time.monotonic_ns() - int(_BALANCE_S * 1e9)):
                    num_idle -= 1

    def _settle(self, worker: WorkerHandle, frame: Frame) -> None:
        assert frame.kind == BLOCK
        number, num_done, counts, failure, service_s, sizes, where, placed_nbytes, retired = pickle.loads(frame.meta)
        destination = worker.destinations.pop(number, None)
        for segment in retired:
            worker.views.forget(segment)
        memory, nbytes = frame.body, len(frame.body)
        if where is not None:
            segment, segment_bytes, nbytes = where
            if frame.descriptors:
                worker.views.attach(segment, frame.descriptors[0], segment_bytes)
            owner = worker.views.view(segment, nbytes, worker.returned.append)
            self._held.hold_with(owner, nbytes)
            memory = owner.data
        elif nbytes:
            memory = self._held.hold(memory)
        pending = worker.pending.get(number)
        if pending is not None and num_done == REVOKED:  # at the very moment at which it would have begun
            pending.finish()
        elif pending is not None:
            try:
                elsewhere = None if destination is None else destination.memory
                outcome = Outcome(num_done, counts, decode(sizes, memory, elsewhere), failure)
            except Exception as error:  # noqa: BLE001 - a foreign __setstate__ may raise anything
                outcome = Outcome(0, [], [], describe_failure(error))
            name, raw_nbytes = f"{worker.name} (pid {worker.pid})", pending.raw_nbytes_of(outcome.num_done)
            pending.block = Block(outcome, name, service_s, nbytes + placed_nbytes, raw_nbytes)
            if not isinstance(outcome.samples, SampleColumns):  # they were unpickled to memory of their own
                self._held.hold_with(pending.block, nbytes)
            pending.finish()
        worker.last_block_ns = time.monotonic_ns()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._notify()

    def _notify(self) -> None:
        self._changed.notify()


def _load(worker: WorkerHandle) -> int:
    return len(worker.pending)


def _death(worker: WorkerHandle, exitcode: int | None) -> WorkerError:
    how = describe_exit(exitcode)
    hint = "look for the out-of-memory killer or a crash in native code"
    if worker.timed_out_s is not None:
        how = f"made no progress for {worker.timed_out_s:g} s and was killed"
        hint = "look for endless work, or raise timeout_s"
    return WorkerError(
        f"expected worker {worker.name} (pid {worker.pid}) to run until the loader closes, but it {how} "
        f"while it held {len(worker.pending)} chunk(s); {hint}",
        pid=worker.pid,
        exitcode=exitcode,
        worker=worker.name,
    )


def _poisoned(death: WorkerError) -> Block:
    """Return the block of a record that has killed its worker too often."""
    return Block(
        Outcome(0, [], [], Failure("WorkerError", death.message, "", death, class_names(WorkerError))),
        f"{death.worker} (pid {death.pid})",
        0.0,
    )


def _first_unmovable(records: Sequence[Any]) -> tuple[int, Failure]:
    for index, record in enumerate(records):
        try:
            encode([record])
        except Exception as error:  # noqa: BLE001 - a foreign __reduce__ may raise anything
            return index, describe_failure(error)
    raise RuntimeError("records could not be encoded together but could one by one")
