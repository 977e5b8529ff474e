"""The work of the pool: how large chunks are, where their samples go, what they cost, and what becomes of records that fail."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple

import anyio

from aioloader.batching import FixedBatch
from aioloader.engine.assembler import Stamps
from aioloader.engine.attempt import Attempt
from aioloader.engine.chunking import MAX_BUFFER, ChunkSize, buffer_limit
from aioloader.engine.placement import Placement
from aioloader.engine.plan import Plan
from aioloader.engine.producer import Queue
from aioloader.engine.roles import Pool, Sink
from aioloader.errors import AioLoaderError
from aioloader.pools.chunk import Block, Chunk
from aioloader.pools.sizes import approximate_nbytes
from aioloader.protocols import RecordId
from aioloader.runtime.budget import Budget
from aioloader.sequences import SampleColumns
from aioloader.telemetry.stages import Stages

__all__ = ["Ran", "Work"]

_MEASURED_HOPS = 16
_SPARE_SHARE = 4  # samples may take a quarter more than was foretold before the rest of their chunk is put off
_SPARE_BYTES = 1 << 16
_STALE_FACTOR = 2


class Ran(NamedTuple):
    """What became of the first `num_taken` records of a chunk, and the error of the one after them, if that is why there are no more."""

    num_taken: int
    block: Block
    error: AioLoaderError | None


class Work:
    """Cuts chunks, runs them, and keeps the budget of what is in flight up to date with what they took."""

    def __init__(self, plan: Plan, pool: Pool, sink: Sink, stages: Stages) -> None:
        self.num_running = 0
        self._plan = plan
        self._pool = pool
        self._sink = sink
        self._stages = stages
        self._chunk_size = ChunkSize(num_slots=pool.capacity, buffer_size=plan.buffer_size or MAX_BUFFER, memory_limit=plan.memory_limit)
        self._placement = _placement(plan, pool, sink)
        self._num_hops = 0
        self._cpu_s = time.thread_time()
        self.budget = Budget(self._max_records(), plan.memory_limit, self._held_bytes, num_unmeasured=pool.num_workers)
        self.budget.headroom_bytes = sink.headroom_bytes

    def begin_epoch(self) -> None:
        """Note that the next chunk starts an epoch, or that there is none."""
        if self._placement is not None:
            self._placement.begin_epoch()

    def cut(self, queue: Queue, epoch: int) -> tuple[Stamps, Chunk]:
        """Take the next chunk from a queue that is not empty."""
        size = self._chunk_size.records
        max_bytes = self._chunk_size.max_bytes
        if self._placement is None:
            return queue.cut(epoch, size, max_bytes)
        stamps, chunk = queue.cut(epoch, self._placement.limit(size), max_bytes)
        return stamps, self._placement.place(chunk)

    def num_admitted(self, chunk: Chunk, *, is_next: bool) -> int:
        """Return how many of the first records of a chunk may be run now; see `Budget.num_admitted`.

        Fewer than it has, also, if it was cut before it was known how large they become.
        """
        number, is_placed = len(chunk.records), chunk.destination is not None
        if not is_placed and self.budget.estimated_bytes(number) > _STALE_FACTOR * self._chunk_size.max_bytes:
            number = min(number, self._chunk_size.records)
        return self.budget.num_admitted(number, is_next=is_next, is_placed=is_placed)

    async def run(self, stamps: Stamps, chunk: Chunk, quarantined: Collection[RecordId]) -> Ran:
        """Run a chunk that was admitted, or as much of it as does not take much more than was foretold."""
        started = time.perf_counter()
        expected_bytes = self.budget.estimated_bytes(len(chunk.records))
        if len(chunk.records) > 1:
            max_bytes = expected_bytes + expected_bytes // _SPARE_SHARE + _SPARE_BYTES
            chunk = chunk._replace(max_bytes=max_bytes if expected_bytes else self._chunk_size.max_bytes)
        if chunk.destination is not None:
            expected_bytes = 0  # they are counted where they will lie
        self.num_running += 1
        self.budget.begin(expected_bytes)
        try:
            ran = await self._run(stamps, chunk, quarantined)
        finally:
            self.num_running -= 1
            self.budget.finish(expected_bytes)
        block = ran.block
        num_done = block.outcome.num_done
        done = chunk if ran.num_taken == len(chunk.records) else chunk.split(ran.num_taken)[0]
        self.budget.hold_raw(-done.raw_nbytes)
        self._count_hop()
        self._stages.preprocess.add(num_done, block.service_s, time.perf_counter() - started - block.service_s)
        self._chunk_size.observe(num_done, block.service_s, block.nbytes)
        self.budget.slots.limit = self._max_records()
        self.budget.num_finished += num_done
        self.budget.observe(num_done, block.raw_nbytes, block.nbytes)
        self.budget.observe_raw(num_done, block.raw_nbytes, approximate_nbytes(done.records))
        self.budget.changed()
        return ran

    async def _run(self, stamps: Stamps, chunk: Chunk, quarantined: Collection[RecordId]) -> Ran:
        """Run a chunk until each record is done or left out, one fails for good, or the samples take too much."""
        attempt = Attempt(self._plan.faults, quarantined, stamps, chunk)
        while (step := attempt.step()) is not None:
            if step.delay_s:
                await anyio.sleep(step.delay_s)
            try:
                block = await self._pool.run(step.chunk)
            except AioLoaderError as error:
                attempt.lost(error)
                break
            attempt.ran(block)
            if block.outcome.failure is None and block.outcome.num_done < len(step.chunk.records):
                break
        return Ran(attempt.num_taken, attempt.block, attempt.error)

    def each_bytes(self, block: Block) -> float:
        """Return what a record of a block takes that the pool does not count once the block is gone."""
        return self._uncounted_bytes(block) / max(1, block.outcome.num_done)

    def _uncounted_bytes(self, block: Block) -> int:
        if block.parts:
            return sum(map(self._uncounted_bytes, block.parts))
        views_what_is_counted = self._pool.held_bytes is not None and isinstance(block.outcome.samples, SampleColumns)
        return 0 if views_what_is_counted else block.nbytes

    def _count_hop(self) -> None:
        """Measure, now and then, what a chunk costs this thread."""
        self._num_hops += 1
        if self._num_hops >= _MEASURED_HOPS:
            before_s, self._cpu_s = self._cpu_s, time.thread_time()
            self._chunk_size.observe_hop((self._cpu_s - before_s) / self._num_hops)
            self._num_hops = 0

    def _max_records(self) -> int:
        return buffer_limit(self._plan.buffer_size, num_workers=self._pool.num_workers, chunk_size=self._chunk_size.records)

    def _held_bytes(self) -> int:
        """Return the bytes of results and of waiting micro-batches."""
        held = self._pool.held_bytes
        if held is None:
            held = self.budget.estimated_bytes(self.budget.num_finished)
        return self._sink.waiting_bytes + held + int(self.budget.slots.open_bytes)


def _placement(plan: Plan, pool: Pool, sink: Sink) -> Placement | None:
    """Return the dealer of rows, where a sample's row can be known before it is made and its field is not changed by the collator."""
    if not isinstance(plan.batching, FixedBatch) or len(plan.lanes.served) > 1:
        return None
    is_copied_whole = pool.takes_destinations and hasattr(plan.collate, "collate_columns")
    return Placement(plan.batching.batch_size, sink) if is_copied_whole else None
