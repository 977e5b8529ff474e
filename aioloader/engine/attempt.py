"""One chunk on its way through the failure policy: what to run next, and what came of it. Pure: no waiting, no I/O."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from aioloader.engine.assembler import Stamps
from aioloader.engine.errors import preprocess_error, with_records
from aioloader.errors import AioLoaderError
from aioloader.faults import FaultPolicy, Quarantine
from aioloader.pools.chunk import Block, Chunk, Outcome, Quarantined
from aioloader.pools.recovery import join_blocks
from aioloader.protocols import RecordId

__all__ = ["Attempt", "Step"]


class Step(NamedTuple):
    """Run `chunk` after `delay_s` seconds."""

    chunk: Chunk
    delay_s: float = 0.0


class Attempt:
    """Runs a chunk until each record is done, quarantined, or the error of the chunk.

    while (step := attempt.step()) is not None:
        attempt.ran(the block of step.chunk)          or attempt.lost(error)
    attempt.block, attempt.error
    """

    def __init__(self, policy: FaultPolicy, known: Collection[RecordId], stamps: Stamps, chunk: Chunk) -> None:
        self.error: AioLoaderError | None = None
        self._policy = policy
        self._known = known
        self._stamps = stamps
        self._chunk = chunk
        self._start = 0
        self._blocks: list[Block] = []
        self._made_bytes = 0
        self._num_failures = 0
        self._delay_s = 0.0

    @property
    def num_taken(self) -> int:
        """Return the records that were done or left out."""
        return self._start

    @property
    def block(self) -> Block:
        """Return what the records before the error became."""
        return join_blocks(self._blocks) if self._blocks else Block(Outcome(0, [], [], None), "none", 0.0)

    def step(self) -> Step | None:
        """Return what to run next, None when there is nothing more to do. Records quarantined before are not run again."""
        chunk = self._chunk
        while self.error is None and self._start < len(chunk.ids):
            end = len(chunk.ids)
            if self._known:
                end = next((index for index in range(self._start, end) if chunk.ids[index] in self._known), end)
            if end > self._start:
                delay_s, self._delay_s = self._delay_s, 0.0
                if (self._start, end) != (0, len(chunk.ids)):
                    chunk = chunk.split(end)[0].split(self._start)[1]
                if chunk.max_bytes is not None:
                    chunk = chunk._replace(max_bytes=max(0, chunk.max_bytes - self._made_bytes))
                return Step(chunk, delay_s)
            self._leave_out(None, None)
        return None

    def ran(self, block: Block) -> None:
        """Take the block of the last step's chunk and decide about its failure."""
        failure = block.outcome.failure
        if block.outcome.num_done:
            self._num_failures = 0
            self._start += block.outcome.num_done
            self._made_bytes += block.nbytes
            self._blocks.append(block if failure is None else block.with_failure(None))
        if failure is None:
            return
        self._num_failures += 1
        error = preprocess_error(failure, self._stamps.at(self._start), block.worker)
        decision = self._policy.decide(failure.kinds, self._num_failures)
        if decision.kind == "retry":
            self._delay_s = decision.delay_s
        elif decision.kind == "quarantine":
            self._leave_out(error, decision.quarantine)
        else:
            self.error = error

    def lost(self, error: AioLoaderError) -> None:
        """Take the error of a pool that can run nothing more."""
        self.error = with_records(error, self._stamps.part(self._start))

    def _leave_out(self, error: AioLoaderError | None, quarantine: Quarantine | None) -> None:
        outcome = Outcome(1, [0], [], None, (Quarantined(0, error, quarantine),))
        self._blocks.append(Block(outcome, "none", 0.0))
        self._start += 1
        self._num_failures = 0
