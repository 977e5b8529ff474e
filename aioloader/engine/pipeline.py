"""The running engine: one task group that reads, offloads, reorders, assembles and hands over.

    reader --> stamper --> chunks --> pool --> ordered heap --> assembler --> collate --> sink
       <---------------- in-flight budget: taken before reading, given back at delivery --------

All stages meet here and nowhere else. Every decision is made by the pure parts; this module waits and moves values.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from aioloader.engine.assembler import Assembler, Stamps, Turn
from aioloader.engine.attempt import Attempt, Step
from aioloader.engine.chunking import MAX_BUFFER, ChunkSize, buffer_limit
from aioloader.engine.errors import batching_error, source_error
from aioloader.engine.heap import OrderedHeap
from aioloader.engine.output import Ready, collate
from aioloader.engine.placement import Placement, Reserving
from aioloader.engine.plan import Plan, Run
from aioloader.engine.producer import Queue, Stamper
from aioloader.engine.progress import Progress
from aioloader.engine.quarantine_log import log_quarantined
from aioloader.engine.reading import Reading
from aioloader.engine.watchdog import Facts, Watchdog, describe_stall, source_stack
from aioloader.errors import AioLoaderError, StallError
from aioloader.pools.chunk import Block, Chunk
from aioloader.protocols import Cursor, Json
from aioloader.runtime.budget import Budget
from aioloader.runtime.signal import Signal
from aioloader.runtime.threads import CallThread
from aioloader.sequences import SampleColumns
from aioloader.telemetry.stages import Stages
from aioloader.telemetry.waits import WaitCauses

__all__ = ["Pipeline", "Pool", "Sink"]

_log = logging.getLogger("aioloader")

_MAX_READ = 512
_MEASURED_HOPS = 16
_SLOW_COLLATE_S = 0.002  # above this a collator would hold up the loop for longer than a thread hop costs


class Pool(Protocol):
    """What the pipeline needs of a pool."""

    capacity: int
    num_workers: int
    takes_destinations: bool
    """Whether workers write samples where a chunk says."""

    @property
    def held_bytes(self) -> int | None:
        """Return the bytes of results that are still in use, None where they are not known."""

    async def run(self, chunk: Chunk) -> Block:
        """Preprocess a chunk."""

    async def stacks(self) -> dict[str, str]:
        """Return where each worker stands."""


class Sink(Reserving, Protocol):
    """Where micro-batches go."""

    @property
    def has_room(self) -> bool:
        """Return whether one more micro-batch may wait for the trainer."""

    async def room(self) -> None:
        """Wait until one more micro-batch may wait for the trainer."""

    @property
    def waiting_bytes(self) -> int:
        """Return the bytes of the micro-batches that wait for the trainer."""

    @property
    def batch_bytes(self) -> int:
        """Return the bytes of the last micro-batch."""

    async def put(self, ready: Ready, cause: int) -> None:
        """Hand one over, in order, with what the engine was waiting for before it (an index into `CAUSES`)."""


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
        self._chunk_size = ChunkSize(num_slots=pool.capacity, buffer_size=plan.buffer_size or MAX_BUFFER, memory_limit=plan.memory_limit)
        self.budget = Budget(self._max_records(), plan.memory_limit, self._held_bytes)
        self.budget.headroom_bytes = sink.batch_bytes
        self._assembler = Assembler(plan.lanes, plan.batching, run.state, self.budget.slots, keep_partial=plan.keep_partial)
        self._heap: OrderedHeap[_Ran | _EpochEnd | _Broken] = OrderedHeap()
        self._arrived = Signal()
        self._queue = Queue()
        self._queued = Signal()
        self._epoch = 0
        self._next_index = 0
        self._progress = Progress(run)
        self._error: AioLoaderError | None = None
        self._causes = WaitCauses()
        self._is_in_columns = True
        self._placement = _placement(plan, pool, sink)
        self._is_reading = False
        self._is_collating = False
        self._num_running = 0
        self._num_hops = 0
        self._cpu_s = time.thread_time()
        self._collate_s = 0.0
        self._collate_thread: CallThread | None = None

    def _max_records(self) -> int:
        return buffer_limit(self._plan.buffer_size, num_workers=self._pool.num_workers, chunk_size=self._chunk_size.records)

    def _held_bytes(self) -> int:
        """Return the bytes of results and of waiting micro-batches."""
        held = self._pool.held_bytes
        if held is None:
            held = self.budget.estimated_bytes(self.budget.num_finished)
        elif self._is_in_columns:  # samples in incomplete micro-batches view what the pool counts
            return self._sink.waiting_bytes + held
        return self._sink.waiting_bytes + held + self.budget.estimated_bytes(self.budget.slots.open)

    def following(self, state: Json) -> Run | None:
        """Return the pass to run next if this one was resumed at its end; `state` is what `run` returned."""
        return self._progress.following(state)

    async def run(self) -> Json:
        """Run the pass and return the state at the start of the next one.

        Raises:
            AioLoaderError: A stage failed; everything before the failing record was handed over.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._produce)
                for _ in range(self._pool.capacity):
                    tasks.start_soon(self._offload)
                if self._plan.stall_timeout_s is not None:
                    tasks.start_soon(self._watch, self._plan.stall_timeout_s, tasks)
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

    async def _produce(self) -> None:
        place = self._run.state["source"]
        epoch, position, cursor = place["epoch"], place["position"], place["cursor"]
        while not self._progress.is_over(epoch):
            try:
                stamper = await self._read_epoch(epoch, position, cursor)
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:  # noqa: BLE001 - also SystemExit: travels in its place and ends the pass there
                await self._drain()
                self._push(_Broken(source_error(error)))
                return
            await self._drain()
            self._push(_EpochEnd(epoch, [row[0] for row in stamper.held]))
            epoch, position, cursor = epoch + 1, 0, None

    async def _read_epoch(self, epoch: int, position: int, cursor: Cursor | None) -> Stamper:
        """Read one epoch from `position` on into the queue; returns at its end."""
        plan, slots = self._plan, self.budget.slots
        stamper = Stamper(plan.lanes, plan.batching, self._run.state, epoch=epoch, position=position, even=not plan.keep_partial)
        self._epoch = epoch
        if self._placement is not None:
            self._placement.begin_epoch()
        reading = await Reading.open(plan.source, epoch, cursor)
        try:
            while True:
                taken = await self.budget.acquire(_MAX_READ)
                started = time.perf_counter()
                self._is_reading = True
                try:
                    at, span = await reading.read(taken)
                except BaseException:
                    slots.drop(taken)
                    slots.hold(-stamper.release(self._queue))
                    self._queued.notify()
                    raise
                finally:
                    self._is_reading = False
                self._progress.cursors.add((epoch, stamper.position), at)
                if span is None:
                    slots.drop(taken)
                    slots.discard(len(stamper.held))
                    return stamper
                self._stages.source.add(len(span.records), time.perf_counter() - started)
                held = len(stamper.held)
                passed = stamper.stamp(span, self._queue)
                slots.drop(taken - len(span.records) + passed)
                self.budget.note_peaks()
                slots.hold(len(stamper.held) - held)
                self._queued.notify()
        finally:
            with anyio.CancelScope(shield=True):  # files and generators are closed whatever ends the pass
                await reading.close()

    async def _drain(self) -> None:
        """Wait until everything read is on its way, so that what is pushed next comes after it."""
        while len(self._queue):
            await self._queued.wait()

    async def _offload(self) -> None:
        """Take chunks from the queue to the pool, one after another; as many of these run as the pool takes chunks."""
        while True:
            while not len(self._queue):
                await self._queued.wait()
            placement, size = self._placement, self._chunk_size.records
            stamps, chunk = self._queue.cut(self._epoch, size if placement is None else placement.limit(size))
            if placement is not None:
                chunk = placement.place(chunk)
            index = self._next_index
            self._next_index += len(chunk.records)
            if not len(self._queue):
                self._queued.notify()
            await self._process(index, stamps, chunk)

    async def _process(self, index: int, stamps: Stamps, chunk: Chunk) -> None:
        started = time.perf_counter()
        self._num_running += 1
        try:
            block, error = await self._run_chunk(stamps, chunk)
        finally:
            self._num_running -= 1
        self._count_hop()
        self._stages.preprocess.add(block.outcome.num_done, block.service_s, time.perf_counter() - started - block.service_s)
        self._chunk_size.observe(block.outcome.num_done, block.service_s, block.nbytes)
        self.budget.slots.limit = self._max_records()
        self.budget.num_finished += block.outcome.num_done
        self._is_in_columns = isinstance(block.outcome.samples, SampleColumns)
        self.budget.observe(block.outcome.num_done, block.raw_nbytes, block.nbytes)
        self._heap.push(index, len(chunk.records), _Ran(stamps, block, error))
        self._arrived.notify()

    def _count_hop(self) -> None:
        """Measure, now and then, what a chunk costs this thread."""
        self._num_hops += 1
        if self._num_hops >= _MEASURED_HOPS:
            before_s, self._cpu_s = self._cpu_s, time.thread_time()
            self._chunk_size.observe_hop((self._cpu_s - before_s) / self._num_hops)
            self._num_hops = 0

    async def _run_chunk(self, stamps: Stamps, chunk: Chunk) -> tuple[Block, AioLoaderError | None]:
        """Run a chunk until each record is done or left out, or one fails for good."""
        attempt: Attempt | None = None
        step: Step | None = Step(chunk)
        if self._assembler.quarantined:
            attempt = Attempt(self._plan.faults, self._assembler.quarantined, stamps, chunk)
            step = attempt.step()
        while step is not None:
            if step.delay_s:
                await anyio.sleep(step.delay_s)
            try:
                block = await self._pool.run(step.chunk)
            except AioLoaderError as error:
                attempt = attempt or Attempt(self._plan.faults, self._assembler.quarantined, stamps, chunk)
                attempt.lost(error)
                break
            if attempt is None:
                if block.outcome.failure is None:
                    return block, None  # as nearly always
                attempt = Attempt(self._plan.faults, self._assembler.quarantined, stamps, chunk)
            attempt.ran(block)
            step = attempt.step()
        assert attempt is not None
        return attempt.block, attempt.error

    def _push(self, entry: _EpochEnd | _Broken) -> None:
        self._heap.push(self._next_index, 1, entry)
        self._next_index += 1
        self._arrived.notify()

    # Assembling

    async def _assemble(self) -> Json:
        if self._progress.is_over(self._run.state["source"]["epoch"]):
            return self._progress.next_pass(self._assembler)
        while True:
            entry = await self._next_in_order()
            error = None if isinstance(entry, _EpochEnd) else entry.error
            if isinstance(entry, _Ran):
                self.budget.num_finished -= entry.block.outcome.num_done
                error = await self._hand_over_all(self._assembler.take(entry.stamps, entry.block.outcome)) or error
                if self._assembler.newly_quarantined:
                    await self._log_quarantined()
            elif isinstance(entry, _EpochEnd) and (state := await self._finish_epoch(entry)) is not None:
                return state
            if error is not None:
                await self._hand_over_all(self._assembler.end_early())
                raise error

    async def _log_quarantined(self) -> None:
        """Write down the records that were left out, in order."""
        entries, self._assembler.newly_quarantined = self._assembler.newly_quarantined, []
        await anyio.to_thread.run_sync(log_quarantined, entries)

    async def _next_in_order(self) -> _Ran | _EpochEnd | _Broken:
        while (entry := self._heap.pop()) is None:
            started = time.perf_counter()
            await self._arrived.wait()
            waited_s = time.perf_counter() - started
            self._stages.order.add_wait(waited_s)
            self._causes.add(waited_s, has_results=len(self._heap) > 1, has_work=self._num_running > 0)
        self._stages.order.add(1, 0.0)
        return entry

    async def _finish_epoch(self, entry: _EpochEnd) -> Json | None:
        """Finish the lanes; return the next pass's state if this was the last epoch of the pass."""
        for lane in entry.ragged:
            self._assembler.drop_record(lane)
        error = await self._hand_over_all(self._assembler.end_epoch(entry.epoch))
        if error is not None:
            raise error
        if self._progress.is_over(entry.epoch + 1):
            return self._progress.next_pass(self._assembler)
        self._progress.check_epoch(entry.epoch)
        return None

    async def _hand_over_all(self, turns: Iterator[Turn]) -> AioLoaderError | None:
        """Hand over micro-batches as they are formed; return the error that forming one raised."""
        while True:
            try:
                turn = next(turns, None)
            except Exception as error:  # noqa: BLE001 - a batching may be the user's own
                return batching_error(error)
            finally:
                self.budget.changed()
            if turn is None:
                return None
            await self._hand_over(turn)

    async def _hand_over(self, turn: Turn) -> None:
        started = time.perf_counter()
        await self._sink.room()
        self._stages.bridge.add(1, 0.0, time.perf_counter() - started)
        started = time.perf_counter()
        self._is_collating = True
        state = self._progress.state_after(turn)
        if self._collate_s > _SLOW_COLLATE_S:
            self._collate_thread = self._collate_thread or CallThread("aioloader-collate")
            ready = await self._collate_thread.call(collate, turn, self._plan.collate, state)
        else:
            ready = collate(turn, self._plan.collate, state)
        self._is_collating = False
        self._collate_s = time.perf_counter() - started
        self._stages.batch.add(ready.num_samples, self._collate_s)
        self._progress.num_delivered += 1
        await self._sink.put(ready, self._causes.take())
        self.budget.headroom_bytes = self._sink.batch_bytes
        self.budget.note_peaks()

    # Watching

    async def _watch(self, timeout_s: float, tasks: TaskGroup) -> None:
        """Report a stage that does not get on, and end the pass if that is asked for."""
        watchdog = Watchdog(timeout_s, time.monotonic())
        while True:
            await anyio.sleep(min(5.0, timeout_s / 4))
            facts = self._facts()
            stalled_s = watchdog.look(facts, time.monotonic())
            if stalled_s is None:
                continue
            report = describe_stall(facts, stalled_s, {**source_stack(), **await self._pool.stacks()})
            _log.warning("%s", report)
            if self._plan.raise_on_stall:
                self._error = StallError(facts.stage, report)
                tasks.cancel_scope.cancel()

    def _facts(self) -> Facts:
        return Facts(
            progress=(self._stages.source.count, self._stages.order.count, self._progress.num_delivered),
            is_consumer_bound=not self._sink.has_room,
            is_reading=self._is_reading,
            num_running=self._num_running,
            is_collating=self._is_collating,
        )


def _placement(plan: Plan, pool: Pool, sink: Sink) -> Placement | None:
    """Return the dealer of rows, where a sample's row can be known before it is made and its field is not changed by the collator."""
    batch_size = getattr(plan.batching, "batch_size", None)
    is_known = type(batch_size) is int and len(plan.lanes.served) == 1 and hasattr(plan.collate, "collate_columns")
    return Placement(batch_size, sink) if is_known and pool.takes_destinations and batch_size is not None else None
