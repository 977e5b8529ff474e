"""The running engine: one task group that reads, offloads, reorders, assembles and hands over.

    reader --> stamper --> chunks --> pool --> ordered heap --> assembler --> collate --> sink
       <---------------- in-flight budget: taken before reading, given back at delivery --------

All stages meet here and nowhere else. Every decision is made by the pure parts; this module waits and moves values.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from aioloader.engine.assembler import Assembler, Stamps, Turn
from aioloader.engine.errors import batching_error, source_error
from aioloader.engine.heap import OrderedHeap
from aioloader.engine.lane import LaneBatch
from aioloader.engine.output import collate
from aioloader.engine.overflow import Overflow, Stored, describe_failure, describe_overflow
from aioloader.engine.plan import Plan, Run
from aioloader.engine.producer import Queue, Stamper
from aioloader.engine.progress import Progress
from aioloader.engine.quarantine_log import log_quarantined
from aioloader.engine.roles import Pool, Sink
from aioloader.engine.watchdog import Facts, describe_stall
from aioloader.engine.watcher import Stall, Watcher
from aioloader.engine.work import Work
from aioloader.errors import AioLoaderError, StallError
from aioloader.pools.chunk import Block, Chunk
from aioloader.pools.sizes import sizes_of
from aioloader.protocols import Cursor, Json
from aioloader.runtime.signal import Signal
from aioloader.runtime.threads import CallThread
from aioloader.sources.reading import Reading
from aioloader.telemetry.stages import Stages
from aioloader.telemetry.waits import WaitCauses

__all__ = ["Pipeline"]

_log = logging.getLogger("aioloader")

_MAX_READ = 512
_QUICK_S = 0.003  # what one micro-batch may take until it is put, and how long the first of those kept may wait; 16 take 2 ms, or 3 cold
_FORGETTING = 0.8  # per micro-batch: how fast a slow one is forgotten; after 0.2 s it takes 27 quick ones to trust again
_SLOW_COLLATE_S = 0.002  # above this a collator would hold up the loop for longer than a thread hop costs


@dataclass(frozen=True, slots=True)
class _Ran:
    stamps: Stamps
    block: Block
    error: AioLoaderError | None = None


class _Cut(NamedTuple):
    """A chunk, and the index of its first record: they are told apart, and ordered, by it."""

    first: int
    stamps: Stamps
    chunk: Chunk


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
        self._work = Work(plan, pool, sink, stages)
        self.budget = self._work.budget
        self._assembler = Assembler(
            plan.lanes,
            plan.batching,
            run.state,
            self.budget.slots,
            keep_partial=plan.keep_partial,
            first_repeat=plan.num_distinct,
            quarantined=run.quarantined,
        )
        self._heap: OrderedHeap[_Ran | _EpochEnd | _Broken] = OrderedHeap()
        self._arrived = Signal()
        self._queue = Queue()
        self._queued = Signal()
        """Records were read or put back, there is room, or the queue is empty."""
        self.budget.on_room = self._queued.notify
        self._left: list[_Cut] = []
        """Chunks that no worker has, a heap; all of them come before the queue."""
        self._epoch = 0
        self._next_index = 0
        self._progress = Progress(run)
        self.overflow = Overflow()
        self._error: AioLoaderError | None = None
        self._causes = WaitCauses()
        self._is_reading = False
        self._is_collating = False
        self._collate_s = 0.0
        self._slowest_s = 0.0
        """What the slowest of late took to be formed, collated and put."""
        self._kept_since_s = 0.0
        """When work on the first of those began that wait for company."""
        self._collate_thread: CallThread | None = None

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
            self._work.begin_epoch()
            self.overflow.close()
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
        stamper = Stamper.of(plan, self._run.state, epoch, position)
        self._epoch = epoch
        self._work.begin_epoch()
        self._is_reading = True
        reading = await Reading.open(plan.source, epoch, cursor, plan.lanes.share)
        self._is_reading = False
        try:
            while True:
                asked = time.perf_counter()
                taken = await self.budget.acquire(_MAX_READ)
                started = time.perf_counter()
                self._stages.source.add_wait(started - asked)
                self._is_reading = True
                try:
                    at, span = await reading.read(taken)
                except BaseException:
                    slots.drop(taken)
                    with self._counted_raw():
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
                sizes = self.budget.note_read(sizes_of(span.records))
                with self._counted_raw():
                    passed = stamper.stamp(span, self._queue, sizes)
                slots.drop(taken - len(span.records) + passed)
                self.budget.note_peaks()
                slots.hold(len(stamper.held) - held)
                self._queued.notify()
        finally:
            with anyio.CancelScope(shield=True):  # files and generators are closed whatever ends the pass
                await reading.close()

    @contextlib.contextmanager
    def _counted_raw(self) -> Iterator[None]:
        """Count the bytes of what is queued in this block."""
        before = self._queue.nbytes
        yield
        self.budget.hold_raw(self._queue.nbytes - before)

    async def _drain(self) -> None:
        """Wait until everything read is on its way, so that what is pushed next comes after it."""
        while len(self._queue):
            await self._queued.wait()

    async def _offload(self) -> None:
        """Take chunks from the queue to the pool, one after another; as many of these run as the pool takes chunks."""
        while True:
            while (cut := self._cut()) is None:
                await self._queued.wait()
            await self._process(cut)

    def _cut(self) -> _Cut | None:
        """Take the first records that no worker has, as many as there is room for; None if there are none, or no room."""
        if not self._left:
            if not len(self._queue):
                return None
            stamps, chunk = self._work.cut(self._queue, self._epoch)
            self._left.append(_Cut(self._next_index, stamps, chunk))
            self._next_index += len(chunk.records)
            if not len(self._queue):
                self._queued.notify()
        first, _, chunk = self._left[0]
        number = self._work.num_admitted(chunk, is_next=self._heap.is_next(first))
        if not number:
            return None
        cut = heapq.heappop(self._left)
        return cut if number == len(chunk.records) else self._put_back(cut, number)

    def _put_back(self, cut: _Cut, number: int) -> _Cut:
        """Leave what comes after so many records to whoever is free, before all others; return these records."""
        part, rest = cut.chunk.split(number)
        heapq.heappush(self._left, _Cut(cut.first + number, cut.stamps.part(number), rest))
        self._queued.notify()
        return _Cut(cut.first, cut.stamps.part(0, number), part)

    async def _process(self, cut: _Cut) -> None:
        number = len(cut.chunk.records)
        taken, block, error = await self._work.run(cut.stamps, cut.chunk, self._assembler.quarantined)
        if taken < number and error is None:
            self._put_back(cut, taken)
            number = taken
        self._heap.push(cut.first, number, _Ran(cut.stamps.part(0, number), block, error))
        self._arrived.notify()

    def _push(self, entry: _EpochEnd | _Broken) -> None:
        self._heap.push(self._next_index, 1, entry)
        self._next_index += 1
        self._arrived.notify()

    # Assembling

    async def _assemble(self) -> Json:
        if self._progress.is_over(self._run.state["source"]["epoch"]):
            return await self._finish_pass()
        while True:
            entry = None  # its samples are not kept until the next one comes
            entry = await self._next_in_order()
            error = None if isinstance(entry, _EpochEnd) else entry.error
            if isinstance(entry, _Ran):
                turns = self._take(entry)
                entry = None  # from here on what its block held counts as open
                error = await self._hand_over_all(turns) or error
                if self._assembler.newly_quarantined:
                    await self._log_quarantined()
            elif isinstance(entry, _EpochEnd) and (state := await self._finish_epoch(entry)) is not None:
                return state
            if error is not None:
                await self._hand_over_all(self._assembler.end_early())
                raise error

    def _take(self, ran: _Ran) -> Iterator[Turn]:
        """Return the micro-batches whose turn comes with these records."""
        self.budget.num_finished -= ran.block.outcome.num_done
        return self._assembler.take(ran.stamps, ran.block.outcome, self._work.each_bytes(ran.block))

    async def _log_quarantined(self) -> None:
        """Write down the records that were left out, in order."""
        await self._let_go()
        entries, self._assembler.newly_quarantined = self._assembler.newly_quarantined, []
        await anyio.to_thread.run_sync(log_quarantined, entries)

    async def _next_in_order(self) -> _Ran | _EpochEnd | _Broken:
        while (entry := self._heap.pop()) is None:
            started = time.perf_counter()
            await self._arrived.wait()
            waited_s = time.perf_counter() - started
            self._stages.order.add_wait(waited_s)
            num_running = self._work.num_running
            is_held_up = len(self._heap) > 1 and num_running < self._pool.num_workers  # else more workers would have helped
            self._causes.add(waited_s, is_held_up=is_held_up, has_work=num_running > 0)
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
            return await self._finish_pass()
        self._progress.check_epoch(entry.epoch)
        return None

    async def _finish_pass(self) -> Json:
        """See to lanes of unequal length and return the next pass's state."""
        error = await self._hand_over_all(self._assembler.end_pass(self._plan.end))
        if error is not None:
            raise error
        return self._progress.next_pass(self._assembler)

    async def _hand_over_all(self, turns: Iterator[Turn]) -> AioLoaderError | None:
        """Hand over micro-batches as they are formed; return the error that forming one raised."""
        while True:
            started = time.perf_counter()
            try:
                turn = next(turns, None)
            except Exception as error:  # noqa: BLE001 - a batching may be the user's own
                await self._let_go()
                self.budget.changed()
                return batching_error(error)
            self._stages.batch.add(0, time.perf_counter() - started)
            if turn is None:
                if not self._heap.has_next or self._is_kept_long:
                    await self._let_go()
                await self._store_blocked()
            self.budget.changed()
            if turn is None:
                return None
            await self._hand_over(turn, started)

    async def _store_blocked(self) -> None:
        """Move micro-batches that wait for another lane's turn to the disk as long as they crowd others out."""
        assembler, overflow = self._assembler, self.overflow
        if not self.budget.is_crowded(assembler.num_records_ahead) or overflow.has_failed:
            assembler.keep_blocked()
            return
        await self._let_go()
        while self.budget.is_crowded(assembler.num_records_ahead) and (batch := assembler.storable()) is not None:
            if not overflow.total:
                _log.warning("%s", describe_overflow(batch.lane, assembler.num_blocked))
            try:
                stored = await anyio.to_thread.run_sync(overflow.store, batch.group)
            except Exception as error:  # noqa: BLE001 - a full disk, or samples that cannot be serialised
                overflow.has_failed = True
                _log.warning("%s", describe_failure(error))
                return
            assembler.note_stored(batch, stored)
            self.budget.changed()

    @property
    def _is_kept_long(self) -> bool:
        """Return whether a micro-batch has waited for company for long enough."""
        return self._sink.num_kept > 0 and time.perf_counter() - self._kept_since_s > _QUICK_S

    async def _let_go(self) -> None:
        """Send those that wait for company; until then nothing of what they took has come back."""
        self.budget.note_peaks()
        started = time.perf_counter()
        await self._sink.flush()
        self._stages.bridge.add(0, time.perf_counter() - started)

    async def _bring_back(self, batch: LaneBatch, stored: Stored) -> LaneBatch:
        """Return a micro-batch that was stored, once there is room for its records; nothing that comes after it can make some."""
        slots = self.budget.slots
        while not slots.has_room_for(batch.num_records) and self._sink.num_waiting:
            await self._sink.delivery()
        slots.bring_back(batch.num_records)
        await self._sink.flush()
        group = await anyio.to_thread.run_sync(self.overflow.load, stored)
        return batch._replace(group=group, stored=None)

    async def _hand_over(self, turn: Turn, begun_s: float) -> None:
        """Collate a micro-batch and put it, which it took since `begun_s` to form."""
        waited_s = 0.0
        if not self._sink.has_room:
            self.budget.note_peaks()
            started = time.perf_counter()
            await self._sink.room()
            waited_s = time.perf_counter() - started
            begun_s += waited_s
        if turn.batch.stored is not None:
            turn = turn._replace(batch=await self._bring_back(turn.batch, turn.batch.stored))
            begun_s = time.perf_counter()
        started = time.perf_counter()
        self._is_collating = True
        if self._collate_s > _SLOW_COLLATE_S:
            self._collate_thread = self._collate_thread or CallThread("aioloader-collate")
            ready = await self._collate_thread.call(collate, turn, self._plan.collate, self._progress.state_after)
        else:
            ready = collate(turn, self._plan.collate, self._progress.state_after)
        self._is_collating = False
        collated = time.perf_counter()
        self._collate_s = collated - started
        self._stages.batch.add(ready.num_samples, self._collate_s)
        self._progress.num_delivered += 1
        ready.cause = self._causes.take()
        await self._sink.put(ready)
        self.budget.headroom_bytes = self._sink.headroom_bytes
        done = time.perf_counter()
        self._stages.bridge.add(1, done - collated, waited_s)
        self._slowest_s = max(done - begun_s, self._slowest_s * _FORGETTING)
        if self._sink.num_kept == 1:
            self._kept_since_s = begun_s
        if self._slowest_s > _QUICK_S or self._is_kept_long:
            await self._let_go()

    # Watching

    async def _watch(self, timeout_s: float, tasks: TaskGroup) -> None:
        """Report a stage that does not get on, and end the pass if that is asked for."""
        with Watcher(timeout_s, self._facts, self._report_blocked) as watcher:
            while True:
                facts, stalled_s, stacks = await watcher.stall()
                report = describe_stall(facts, stalled_s, {**stacks, **await self._pool.stacks()})
                _log.warning("%s", report)
                if self._plan.raise_on_stall:
                    self._error = StallError(facts.stage, report)
                    tasks.cancel_scope.cancel()

    def _report_blocked(self, stall: Stall) -> bool:
        """Report what blocks the event loop, in another thread; return whether the pass goes on.

        The pass is ended first: what blocks the loop may block the log.
        """
        report = describe_stall(*stall)
        if self._plan.raise_on_stall:
            self._sink.abort(StallError(stall.facts.stage, report))
        _log.warning("%s", report)
        return not self._plan.raise_on_stall

    def _facts(self) -> Facts:
        return Facts(
            progress=(self._stages.source.count, self._stages.order.count, self._progress.num_delivered),
            is_consumer_bound=not self._sink.has_room,
            is_reading=self._is_reading,
            num_running=self._work.num_running,
            is_collating=self._is_collating,
        )
