"""The assembler: results in order in, micro-batches in step order out, each with the rank's state as of its delivery.

The lanes of a rank take turns: one micro-batch of each, in rising order, makes the rank's share of an optimizer step. A lane
that is ahead waits; the state of the rank holds, for each lane, the state after its last *delivered* micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aioloader.engine.lane import Lane, LaneBatch, fresh_lane_state
from aioloader.order.lanes import LaneMap
from aioloader.pools.chunk import Outcome, Quarantined
from aioloader.protocols import Batching, Json, RecordId
from aioloader.runtime.budget import Slots

__all__ = ["Assembler", "Stamps", "Turn", "fresh_rank_state"]


class Stamps(NamedTuple):
    """What the producer knows of each record of a chunk: its lane, its seq in the lane, its id."""

    lanes: Sequence[int]
    seqs: Sequence[int]
    ids: Sequence[RecordId]

    def at(self, index: int) -> Stamps:
        """Return the stamps of one record."""
        return self.part(index, index + 1)

    def part(self, first: int, last: int | None = None) -> Stamps:
        """Return the stamps of some records."""
        return Stamps(self.lanes[first:last], self.seqs[first:last], self.ids[first:last])


class Turn(NamedTuple):
    """A micro-batch whose turn has come, and the states that the rank is in once it is delivered."""

    batch: LaneBatch
    turn: int
    lanes: dict[str, Json]


def fresh_rank_state(batching: Batching, lanes: LaneMap, epoch: int) -> Json:
    """Return the lane states and turn of a rank before its first record."""
    return {"turn": 0, "lanes": {str(lane): fresh_lane_state(batching, epoch) for lane in lanes.served}}


class Assembler:
    """Batches all lanes of a rank. Pure: no clock, no I/O."""

    def __init__(self, lanes: LaneMap, batching: Batching, state: Json, slots: Slots, *, keep_partial: bool) -> None:
        self._order = list(lanes.served)
        self._lanes = {lane: Lane(lane, batching, state["lanes"][str(lane)], keep_partial=keep_partial) for lane in self._order}
        self._queues: dict[int, deque[LaneBatch]] = {lane: deque() for lane in self._order}
        self._turn = int(state["turn"])
        self._delivered: dict[str, Json] = dict(state["lanes"])
        self._slots = slots
        self.quarantined: set[RecordId] = {record for lane in self._lanes.values() for record in lane.quarantined}
        """Records that are left out wherever they come."""
        self.newly_quarantined: list[Quarantined] = []
        """Those that nobody has written to the log yet."""

    def drop_record(self, lane: int) -> None:
        """Count a record of a ragged end that its lane does not take."""
        self._lanes[lane].drop_record()

    def take(self, stamps: Stamps, outcome: Outcome) -> Iterator[Turn]:
        """Take the records of an outcome in order and yield the micro-batches whose turn comes."""
        if (
            not self.quarantined
            and outcome.counts is None
            and len(self._order) == 1
            and outcome.num_done
            and self._lanes[self._order[0]].takes_runs
        ):
            yield from self._take_run(stamps, outcome)
            return
        left_out = {entry.record_index: entry for entry in outcome.quarantined}
        at = 0
        for index in range(outcome.num_done):
            count = 1 if outcome.counts is None else outcome.counts[index]
            lane = self._lanes[stamps.lanes[index]]
            before = lane.num_open
            num_batched = 0
            samples = outcome.samples[at : at + count]
            if is_left_out := self._is_left_out(stamps.ids[index], left_out.get(index)):
                samples = ()
            self._slots.hold(1)
            for batch in lane.take(stamps.seqs[index], stamps.ids[index], samples, is_left_out=is_left_out):
                num_batched += batch.num_records
                yield from self._enqueue(lane, batch)
            self._slots.discard(1 + before - num_batched - lane.num_open)
            at += count

    def _take_run(self, stamps: Stamps, outcome: Outcome) -> Iterator[Turn]:
        """Take an outcome all of whose records belong to the only lane and gave one sample each."""
        lane, num_records = self._lanes[self._order[0]], outcome.num_done
        self._slots.hold(num_records)
        for batch in lane.take_run(stamps.seqs[:num_records], stamps.ids[:num_records], outcome.samples):
            yield from self._enqueue(lane, batch)

    def _is_left_out(self, record: RecordId, entry: Quarantined | None) -> bool:
        """Return whether a record is quarantined: now, or earlier in this order, so that timing does not matter.

        Raises:
            AioLoaderError: The error of a record that is one too many.
        """
        if record in self.quarantined:
            return True
        if entry is None:
            return False
        num_records = sum(lane.num_records for lane in self._lanes.values()) + 1
        if (
            entry.error is not None
            and entry.quarantine is not None
            and entry.quarantine.is_exceeded(len(self.quarantined) + 1, num_records)
        ):
            entry.error.add_note(f"{entry.quarantine}: this record is one more than it allows, of {num_records} read.")
            raise entry.error
        self.quarantined.add(record)
        self.newly_quarantined.append(entry)
        return True

    def end_epoch(self, epoch: int) -> Iterator[Turn]:
        """Finish all lanes and yield the micro-batches whose turn comes."""
        for lane in self._lanes.values():
            before = lane.num_open
            batches = list(lane.end_epoch(epoch))
            self._slots.discard(before - sum(batch.num_records for batch in batches))
            for batch in batches:
                yield from self._enqueue(lane, batch)

    def end_early(self) -> Iterator[Turn]:
        """Yield everything that came before a failure: first what has its turn, then the rest in step and lane order."""
        rest = [batch for queue in self._queues.values() for batch in queue]
        for queue in self._queues.values():
            queue.clear()
        for lane in self._lanes.values():
            rest.extend(lane.end_early())
        for batch in sorted(rest, key=lambda one: (one.step, one.lane)):
            self._turn = self._order.index(batch.lane)
            yield self._deliver(batch)

    def num_blocked(self) -> int:
        """Return the micro-batches that wait for another lane's turn."""
        return sum(len(queue) for queue in self._queues.values())

    def next_pass(self, epoch: int) -> Json:
        """Return the rank's state at the start of the pass after this one; blocked micro-batches are dropped and counted."""
        states = {}
        for number, lane in self._lanes.items():
            state, blocked = lane.state(), self._queues[number]
            num_dropped = sum(batch.num_samples for batch in blocked)
            self._slots.discard(sum(batch.num_records for batch in blocked))
            state["counts"]["dropped_samples"] += num_dropped
            state["counts"]["delivered_samples"] -= num_dropped
            states[str(number)] = {**state, "epoch": epoch, "step": state["step"] - len(blocked)}
        return {"turn": 0, "lanes": states}

    def _enqueue(self, lane: Lane, batch: LaneBatch) -> Iterator[Turn]:
        """Queue a micro-batch; a step is begun only when every lane has its part, so that no pass ends in mid-step."""
        self._queues[lane.number].append(batch)
        while all(waiting := [self._queues[number] for number in self._order[self._turn :]]):
            for queue in waiting:
                yield self._deliver(queue.popleft())

    def _deliver(self, batch: LaneBatch) -> Turn:
        self._turn = (self._turn + 1) % len(self._order)
        self._delivered = {**self._delivered, str(batch.lane): batch.state}
        self._slots.complete(batch.num_records)
        return Turn(batch, self._turn, self._delivered)
