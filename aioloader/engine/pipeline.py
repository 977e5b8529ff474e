"""The running engine: one task group that reads, offloads, reorders, assembles and hands over.

    reader --> stamper --> chunks --> pool --> ordered heap --> assembler --> collate --> sink
       <---------------- in-flight budget: taken before reading, given back at delivery --------

All stages meet here and nowhere else. Every decision is made by the pure parts; this module waits and moves values.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from aioloader.engine.assembler import Assembler, Stamps, Turn
from aioloader.engine.chunking import ChunkSize
from aioloader.engine.errors import preprocess_error, source_error, with_records
from aioloader.engine.heap import OrderedHeap
from aioloader.engine.output import Ready, collate
from aioloader.engine.plan import Plan, Run
from aioloader.engine.producer import Queue, Stamper
from aioloader.engine.progress import Progress
from aioloader.errors import AioLoaderError, SourceError
from aioloader.pools.chunk import Block, Chunk, Outcome
from aioloader.protocols import AsyncReader, Cursor, Json, Reader, Span
from aioloader.runtime.budget import Budget
from aioloader.runtime.signal import Signal
from aioloader.runtime.threads import CallThread
from aioloader.telemetry.stages import Stages

__all__ = ["Pipeline", "Pool", "Sink"]

_MAX_READ = 512
_SLOW_COLLATE_S = 0.002  # above this a collator would hold up the loop for longer than a thread hop costs


class Pool(Protocol):
    """What the pipeline needs of a pool."""

    capacity: int
    num_workers: int

    async def run(self, chunk: Chunk) -> Block:
        """Preprocess a chunk."""


class Sink(Protocol):
    """Where micro-batches go."""

    async def room(self) -> None:
        """Wait until one more micro-batch may wait for the trainer."""

    async def put(self, ready: Ready) -> None:
        """Hand one over; in order."""


@dataclass(frozen=True, slots=True)
class _Ran:
    stamps: Stamps
    block: Block
    error: AioLoaderError | None = None


@dataclass(frozen=True, slots=True)
class _EpochEnd:
    epoch: int
    ragged: list[int]
    """Lanes of the records that are dropped so that all lanes have the same number."""


@dataclass(frozen=True, slots=True)
class _Broken:
    error: AioLoaderError


class Pipeline:
    """One pass of a loader."""

    def __init__(self, plan: Plan, run: Run, pool: Pool, sink: Sink, stages: Stages) -> None:
        self._plan = plan
        self._run = run
        self._pool = pool
        self._sink = sink
        self._stages = stages
        self.budget = Budget(plan.buffer_size)
        self._assembler = Assembler(plan.lanes, plan.batching, run.state, self.budget.slots, keep_partial=plan.keep_partial)
        self._chunk_size = ChunkSize(num_slots=pool.capacity, buffer_size=plan.buffer_size)
        self._room = anyio.Semaphore(pool.capacity)
        self._heap: OrderedHeap[_Ran | _EpochEnd | _Broken] = OrderedHeap()
        self._arrived = Signal()
        self._next_index = 0
        self._progress = Progress(plan, run)
        self._next_epoch = Signal()
        self._error: AioLoaderError | None = None
        self._collate_s = 0.0
        self._collate_thread: CallThread | None = None

    async def run(self) -> Json:
        """Run the pass and return the state at the start of the next one.

        Raises:
            AioLoaderError: A stage failed; everything before the failing record was handed over.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._produce, tasks)
                try:
                    state = await self._assemble()
                except AioLoaderError as error:  # raised below: a task group would wrap it
                    state, self._error = None, error
                tasks.cancel_scope.cancel()
        finally:
            if self._collate_thread is not None:
                self._collate_thread.stop()
        if self._error is not None:
            raise self._error
        return state

    # Producing

    async def _produce(self, tasks: TaskGroup) -> None:
        place = self._run.state["source"]
        epoch, position, cursor = place["epoch"], place["position"], place["cursor"]
        while True:
            if self._progress.may_be_last(epoch - 1):
                await self._next_epoch.wait()
            try:
                stamper = await self._produce_epoch(tasks, epoch, position, cursor)
            except Exception as error:  # noqa: BLE001 - travels in its place and ends the pass there
                self._push(_Broken(source_error(error)))
                return
            self._push(_EpochEnd(epoch, [row[0] for row in stamper.held]))
            epoch, position, cursor = epoch + 1, 0, None

    async def _produce_epoch(self, tasks: TaskGroup, epoch: int, position: int, cursor: Cursor | None) -> Stamper:
        """Read one epoch from `position` on; returns at its end."""
        plan = self._plan
        stamper = Stamper(plan.lanes, plan.batching, self._run.state, epoch=epoch, position=position, even=not plan.keep_partial)
        reading = await _Reading.open(plan, epoch, cursor)
        try:
            queue = Queue()
            while True:
                taken = await self.budget.acquire(_MAX_READ)
                started = time.perf_counter()
                try:
                    at, span = await reading.read(taken)
                except BaseException:
                    self.budget.slots.drop(taken)
                    raise
                self._progress.cursors.add((epoch, stamper.position), at)
                if span is None:
                    self.budget.slots.drop(taken + len(stamper.held))
                    return stamper
                self._stages.source.add(len(span.records), time.perf_counter() - started)
                passed = stamper.stamp(span, queue)
                self.budget.slots.drop(taken - len(span.records) + passed)
                while len(queue):
                    await self._offload(tasks, queue, epoch)
        finally:
            with anyio.CancelScope(shield=True):  # files and generators are closed whatever ends the pass
                await reading.close()

    async def _offload(self, tasks: TaskGroup, queue: Queue, epoch: int) -> None:
        await self._room.acquire()
        stamps, chunk = queue.cut(epoch, self._chunk_size.records)
        index = self._next_index
        self._next_index += len(chunk.records)
        tasks.start_soon(self._process, index, stamps, chunk)

    async def _process(self, index: int, stamps: Stamps, chunk: Chunk) -> None:
        error: AioLoaderError | None = None
        started = time.perf_counter()
        try:
            block = await self._pool.run(chunk)
            if block.outcome.failure is not None:
                error = preprocess_error(block, stamps)
        except AioLoaderError as failure:
            block, error = Block(Outcome(0, [], [], None), "none", 0.0), with_records(failure, stamps)
        finally:
            self._room.release()
        self._stages.preprocess.add(block.outcome.num_done, block.service_s, time.perf_counter() - started - block.service_s)
        self._chunk_size.observe(block.outcome.num_done, block.service_s)
        self._heap.push(index, len(chunk.records), _Ran(stamps, block, error))
        self._arrived.notify()

    def _push(self, entry: _EpochEnd | _Broken) -> None:
        self._heap.push(self._next_index, 1, entry)
        self._next_index += 1
        self._arrived.notify()

    # Assembling

    async def _assemble(self) -> Json:
        while True:
            entry = await self._next_in_order()
            error = None if isinstance(entry, _EpochEnd) else entry.error
            if isinstance(entry, _Ran):
                error = await self._hand_over_all(self._assembler.take(entry.stamps, entry.block.outcome)) or error
            elif isinstance(entry, _EpochEnd) and (state := await self._finish_epoch(entry)) is not None:
                return state
            if error is not None:
                await self._hand_over_all(self._assembler.end_early())
                raise error

    async def _next_in_order(self) -> _Ran | _EpochEnd | _Broken:
        while (entry := self._heap.pop()) is None:
            started = time.perf_counter()
            await self._arrived.wait()
            self._stages.order.add_wait(time.perf_counter() - started)
        return entry

    async def _finish_epoch(self, entry: _EpochEnd) -> Json | None:
        """Finish the lanes; return the next pass's state if this was the last epoch of the pass."""
        for lane in entry.ragged:
            self._assembler.drop_record(lane)
        error = await self._hand_over_all(self._assembler.end_epoch(entry.epoch))
        if error is not None:
            raise error
        if self._progress.is_last(entry.epoch):
            return self._progress.next_pass(self._assembler)
        self._next_epoch.notify()
        return None

    async def _hand_over_all(self, turns: Iterator[Turn]) -> AioLoaderError | None:
        """Hand over micro-batches as they are formed; return the error that forming one raised."""
        while True:
            try:
                turn = next(turns, None)
            except AioLoaderError as error:
                return error
            finally:
                self.budget.changed()
            if turn is None:
                return None
            await self._hand_over(turn)

    async def _hand_over(self, turn: Turn) -> None:
        await self._sink.room()
        started = time.perf_counter()
        state = self._progress.state_after(turn)
        if self._collate_s > _SLOW_COLLATE_S:
            self._collate_thread = self._collate_thread or CallThread("aioloader-collate")
            ready = await self._collate_thread.call(collate, turn, self._plan.collate, state)
        else:
            ready = collate(turn, self._plan.collate, state)
        self._collate_s = time.perf_counter() - started
        self._stages.batch.add(len(ready.records), self._collate_s)
        self._progress.num_delivered += 1
        await self._sink.put(ready)


class _Reading:
    """One opened source: blocking readers run in a thread of their own, asynchronous ones in the loop."""

    def __init__(self, reader: Reader | AsyncReader, thread: CallThread | None) -> None:
        self._reader: Any = reader
        self._thread = thread

    @classmethod
    async def open(cls, plan: Plan, epoch: int, cursor: Cursor | None) -> _Reading:
        thread = CallThread("aioloader-source")
        try:
            reader = await thread.call(plan.source.open, epoch, cursor)
        except BaseException:
            thread.stop()
            raise
        if inspect.iscoroutinefunction(reader.read):
            thread.stop()
            return cls(reader, None)
        return cls(reader, thread)

    async def read(self, max_records: int) -> tuple[Cursor | None, Span | None]:
        """Return the cursor before the read and what was read."""
        if self._thread is None:
            at = self._reader.cursor()
            return at, await self._reader.read(max_records)
        return await self._thread.call(_read, self._reader, max_records)

    async def close(self) -> None:
        if self._thread is None:
            with anyio.move_on_after(1):
                await self._reader.aclose()
            return
        thread = self._thread
        with anyio.move_on_after(1):  # a source that blocks for ever is left to its daemon thread
            await thread.call(self._reader.close)
        thread.stop()


def _read(reader: Reader, max_records: int) -> tuple[Cursor | None, Span | None]:
    return reader.cursor(), reader.read(max_records)
