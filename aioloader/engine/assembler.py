"""The assembler: results in order in, micro-batches in step order out, each with the rank's state as of its delivery.

The lanes of a rank take turns: one micro-batch of each, in rising order, makes the rank's share of an optimizer step. A lane
that is ahead waits; the state of the rank holds, for each lane, the state after its last *delivered* micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from aioloader.engine.lane import Lane, LaneBatch, fresh_lane_state, oldest_seq
from aioloader.engine.overflow import Stored
from aioloader.engine.waiting import WaitingBatches
from aioloader.errors import UnevenEndError
from aioloader.order.lanes import LaneMap
from aioloader.pools.chunk import Outcome, Quarantined
from aioloader.protocols import Batching, Json, RecordId, Sample
from aioloader.runtime.budget import Slots

__all__ = ["Assembler", "Place", "Stamps", "Turn", "fresh_rank_state"]


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


Place = tuple[int, int]
"""(epoch, position); places are ordered as the run goes through them."""


class Turn(NamedTuple):
    """A micro-batch whose turn has come, the states that the rank is in once it is delivered, and what it then reads first."""

    batch: LaneBatch
    turn: int
    lanes: dict[str, Json]
    place: Place


def fresh_rank_state(batching: Batching, lanes: LaneMap, epoch: int, *, makes_fillers: bool = False) -> Json:
    """Return the lane states and turn of a rank before its first record."""
    return {"turn": 0, "lanes": {str(lane): fresh_lane_state(batching, epoch, makes_fillers=makes_fillers) for lane in lanes.served}}


class Assembler:
    """Batches all lanes of a rank. Pure: no clock, no I/O.

    Args:
        first_repeat: The position of an epoch from which on records are repeated, where they are.
        quarantined: Records to leave out that the state does not know of.
    """

    def __init__(
        self,
        lanes: LaneMap,
        batching: Batching,
        state: Json,
        slots: Slots,
        *,
        keep_partial: bool,
        first_repeat: int | None = None,
        quarantined: Iterable[RecordId] = (),
    ) -> None:
        self._order = list(lanes.served)
        self._lanes = {
            lane: Lane(
                lane,
                batching,
                state["lanes"][str(lane)],
                keep_partial=keep_partial,
                first_repeat=None if first_repeat is None else lanes.num_before(lane, first_repeat),
            )
            for lane in self._order
        }
        self._queues = {lane: WaitingBatches() for lane in self._order}
        self._turn = int(state["turn"])
        self._delivered: dict[str, Json] = dict(state["lanes"])
        self._position = lanes.position
        self._places: dict[int, Place] = {}
        for lane in self._order:
            lane_state = state["lanes"][str(lane)]
            self._places[lane] = (lane_state["epoch"], lanes.position(lane, oldest_seq(batching, lane_state)))
        self._slots = slots
        self._left_out: set[RecordId] = {record for lane in self._lanes.values() for record in lane.quarantined}
        self.quarantined: set[RecordId] = self._left_out.union(quarantined)
        """Records that are left out wherever they come, here or on other ranks."""
        self.newly_quarantined: list[Quarantined] = []
        """Those that nobody has written to the log yet."""

    def drop_record(self, lane: int) -> None:
        """Count a record of a ragged end that its lane does not take."""
        self._lanes[lane].drop_record()

    def take(self, stamps: Stamps, outcome: Outcome, each_bytes: float = 0.0) -> Iterator[Turn]:
        """Take the records of an outcome in order and yield the micro-batches whose turn comes.

        While a record is in one that is not complete, its samples take `each_bytes` that nobody else counts.
        """
        num_runs = self._num_runs(stamps, outcome)
        if num_runs:
            self._slots.hold(outcome.num_done, each_bytes)
            yield from self._take_runs(stamps, outcome, num_runs)
            return
        ids, samples = list(stamps.ids), list(outcome.samples)
        left_out = {entry.record_index: entry for entry in outcome.quarantined}
        at = 0
        for index in range(outcome.num_done):
            count = 1 if outcome.counts is None else outcome.counts[index]
            lane = self._lanes[stamps.lanes[index]]
            before = lane.num_open
            num_batched = 0
            made: Sequence[Sample] = samples[at : at + count]
            if is_left_out := self._is_left_out(ids[index], left_out.get(index)):
                made = ()
            self._slots.hold(1, each_bytes)
            for batch in lane.take(stamps.seqs[index], ids[index], made, is_left_out=is_left_out):
                num_batched += batch.num_records
                yield from self._enqueue(lane, batch)
            self._slots.discard(1 + before - num_batched - lane.num_open)
            at += count

    def _take_runs(self, stamps: Stamps, outcome: Outcome, num_lanes: int) -> Iterator[Turn]:
        """Take an outcome all of whose records gave one sample each, lane by lane: the turns do not depend on which lane is first."""
        for first, number in enumerate(stamps.lanes[:num_lanes]):
            part = slice(first, outcome.num_done, num_lanes)
            lane = self._lanes[number]
            if seqs := stamps.seqs[part]:
                for batch in lane.take_run(seqs, stamps.ids[part], outcome.samples[part]):
                    yield from self._enqueue(lane, batch)

    def _num_runs(self, stamps: Stamps, outcome: Outcome) -> int:
        """Return how many lanes take every so-manieth record of an outcome as a run each; 0 where they cannot."""
        if outcome.counts is not None or not outcome.num_done or self.quarantined:
            return 0
        numbers = set(stamps.lanes)
        if len(numbers) == 1:
            return int(self._lanes[stamps.lanes[0]].takes_runs)
        is_regular = stamps.lanes[len(numbers) :] == stamps.lanes[: -len(numbers)]
        return len(numbers) if is_regular and all(self._lanes[number].takes_any_run for number in numbers) else 0

    def _is_left_out(self, record: RecordId, entry: Quarantined | None) -> bool:
        """Return whether a record is quarantined: now, or earlier in this order, so that timing does not matter.

        Raises:
            AioLoaderError: The error of a record that is one too many.
        """
        if record in self.quarantined:
            self._left_out.add(record)
            return True
        if entry is None:
            return False
        num_records = sum(lane.num_records for lane in self._lanes.values()) + 1
        if entry.error is not None and entry.quarantine is not None and entry.quarantine.is_exceeded(len(self._left_out) + 1, num_records):
            entry.error.add_note(f"{entry.quarantine}: this record is one more than it allows, of {num_records} read.")
            raise entry.error
        self._left_out.add(record)
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

    def end_pass(self, end: str) -> Iterator[Turn]:
        """After the last epoch, see to lanes of unequal length as `end` says; "pad": the shorter ones give fillers.

        With `"drop"`, what the others have more is left to `next_pass`.

        Raises:
            UnevenEndError: Lanes are unequal, and are not to be.
        """
        if end == "pad":
            while self._turn or any(self._queues.values()):
                for number in self._order[self._turn :]:
                    queue = self._queues[number]
                    yield self._deliver(queue.popleft() if queue else self._lanes[number].filler())
        elif end != "drop" and any(self._queues.values()):
            steps = [lane.num_steps for lane in self._lanes.values()]
            raise UnevenEndError(min(steps), max(steps))

    @property
    def num_blocked(self) -> int:
        """Return the micro-batches that wait for another lane's turn."""
        return sum(map(len, self._queues.values()))

    @property
    def num_records_ahead(self) -> int:
        """Return the in-flight slots of those of them that are in memory and belong to later steps than the one that is formed now."""
        return sum([queue.num_records_ahead for queue in self._queues.values()])

    def keep_blocked(self) -> None:
        """Let those that are in memory stay there."""
        for queue in self._queues.values():
            queue.keep()

    def storable(self) -> LaneBatch | None:
        """Return one that may as well wait elsewhere, of the lane with the most in memory that has such."""
        found = [(queue.num_records_ahead, lane) for lane, queue in self._queues.items() if queue.storable() is not None]
        return self._queues[max(found)[1]].storable() if found else None

    def note_stored(self, batch: LaneBatch, stored: Stored) -> None:
        """Note that what `storable` returned is elsewhere now."""
        self._queues[batch.lane].replace(stored)
        self._slots.put_aside(batch.num_records)

    def next_pass(self, epoch: int) -> Json:
        """Return the rank's state at the start of the pass after this one; blocked micro-batches are dropped and counted."""
        states = {}
        for number, lane in self._lanes.items():
            state, blocked = lane.state(), self._queues[number]
            num_dropped = sum(batch.num_samples for batch in blocked)
            self._slots.discard(blocked.num_records)
            state["counts"]["dropped_samples"] += num_dropped
            state["counts"]["delivered_samples"] -= num_dropped
            states[str(number)] = {**self._outline(number), **state, "epoch": epoch, "step": state["step"] - len(blocked)}
        return {"turn": 0, "lanes": states}

    def _enqueue(self, lane: Lane, batch: LaneBatch) -> Iterator[Turn]:
        """Queue a micro-batch; a step is begun only when every lane has its part, so that no pass ends in mid-step."""
        if len(self._order) == 1:
            yield self._deliver(batch)
            return
        self._queues[lane.number].append(batch)
        while all(waiting := [self._queues[number] for number in self._order[self._turn :]]):
            for queue in waiting:
                yield self._deliver(queue.popleft())

    def _deliver(self, batch: LaneBatch) -> Turn:
        self._turn = (self._turn + 1) % len(self._order)
        batch.state.update(self._outline(batch.lane))
        self._delivered = {**self._delivered, str(batch.lane): batch.state}
        self._places[batch.lane] = (batch.state["epoch"], self._position(batch.lane, batch.oldest_seq))
        if batch.stored is None:  # else it is not counted before it is here again
            self._slots.complete(batch.num_records)
        return Turn(batch, self._turn, self._delivered, min(self._places.values()))

    def _outline(self, lane: int) -> dict[str, Json]:
        """Return what fillers of a lane look like, as its state has it, where it has it: that of its last micro-batch."""
        state = self._delivered[str(lane)]
        return {"filler": state["filler"]} if "filler" in state else {}
