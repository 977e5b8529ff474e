"""What a rank must deliver, written down plainly, and a stand-in for the running engine that feeds the pure parts at random."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import strategies as st

from aioloader.batching import FixedBatch, Pack
from aioloader.engine.assembler import Assembler, Stamps, Turn, fresh_rank_state
from aioloader.engine.lane import LaneBatch, oldest_seq
from aioloader.engine.plan import Plan, Run
from aioloader.engine.producer import Queue, Stamper
from aioloader.engine.progress import Progress
from aioloader.faults import FaultPolicy
from aioloader.order.lanes import LaneMap
from aioloader.pools.chunk import Chunk, Outcome
from aioloader.pools.recovery import RecoveryOptions
from aioloader.protocols import Group, Json, PackedRow, RecordId, Span
from aioloader.runtime.budget import Slots
from aioloader.state.schema import fresh_state

Ref = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: `records[position]` holds the token counts of the samples that a record gives."""

    records: list[list[int]]
    num_lanes: int
    dp_size: int
    batching: FixedBatch | Pack
    keep_partial: bool
    num_epochs: int

    def lanes(self, dp_rank: int) -> LaneMap:
        return LaneMap(num_lanes=self.num_lanes, dp_rank=dp_rank, dp_size=self.dp_size)

    def samples(self, position: int) -> list[dict[str, list[int]]]:
        """Return the samples of a record; each token tells where it comes from."""
        return [
            {"input_ids": [(position * 10 + sub) * 100 + number for number in range(length)]}
            for sub, length in enumerate(self.records[position])
        ]

    def plan(self, dp_rank: int) -> Plan:
        nothing: Any = None
        return Plan(
            source=nothing,
            preprocess=b"",
            batching=self.batching,
            collate=nothing,
            lanes=self.lanes(dp_rank),
            seed=0,
            pool="process",
            num_workers=1,
            buffer_size=1,
            memory_limit=1 << 30,
            prefetch_batches=1,
            end="pad" if self.keep_partial else "drop",
            fingerprint={},
            recovery=RecoveryOptions(),
            faults=FaultPolicy("raise"),
            stall_timeout_s=None,
            raise_on_stall=False,
        )

    def fresh(self, dp_rank: int) -> Json:
        lanes = self.lanes(dp_rank)
        return fresh_state({}, lanes, fresh_rank_state(self.batching, lanes, 0), 0)


cases = st.builds(
    lambda lanes_per_rank, dp_size, **rest: Case(num_lanes=lanes_per_rank * dp_size, dp_size=dp_size, **rest),
    lanes_per_rank=st.integers(1, 3),
    dp_size=st.integers(1, 3),
    records=st.lists(
        st.one_of(st.just([1]), st.just([3]), st.just([]), st.lists(st.integers(0, 13), max_size=4)),
        max_size=30,
    ),
    batching=st.one_of(
        st.builds(FixedBatch, st.integers(1, 4)),
        st.builds(Pack, st.integers(1, 6), rows=st.integers(1, 3), overflow=st.sampled_from(["split", "truncate", "drop"])),
    ),
    keep_partial=st.booleans(),
    num_epochs=st.integers(1, 3),
)


# What must come out


def expected(case: Case, dp_rank: int) -> list[tuple[int, int, list[Ref], list[int]]]:
    """Return (lane, epoch, sample refs, tokens) of each micro-batch of a rank, in order."""
    streams = [lane_stream(case, lane) for lane in range(dp_rank, case.num_lanes, case.dp_size)]
    num_steps = min(map(len, streams))
    return [stream[step] for step in range(num_steps) for stream in streams]


def lane_stream(case: Case, lane: int) -> list[tuple[int, int, list[Ref], list[int]]]:
    """Return all micro-batches of a lane."""
    num_records = len(case.records)
    if not case.keep_partial:
        num_records -= num_records % case.num_lanes
    stream = []
    for epoch in range(case.num_epochs):
        samples = []
        for seq, position in enumerate(range(lane, num_records, case.num_lanes)):
            samples += [((seq, sub), sample["input_ids"]) for sub, sample in enumerate(case.samples(position))]
        groups, is_full = fixed(case.batching, samples) if isinstance(case.batching, FixedBatch) else packed(case.batching, samples)
        if not case.keep_partial and groups and not is_full:
            groups.pop()
        stream += [(lane, epoch, refs, tokens) for refs, tokens in groups]
    return stream


def fixed(batching: FixedBatch, samples: list[tuple[Ref, list[int]]]) -> tuple[list[tuple[list[Ref], list[int]]], bool]:
    size = batching.batch_size
    parts = [samples[at : at + size] for at in range(0, len(samples), size)]
    groups = [([ref for ref, _ in part], [token for _, tokens in part for token in tokens]) for part in parts]
    return groups, bool(parts) and len(parts[-1]) == size


def packed(batching: Pack, samples: list[tuple[Ref, list[int]]]) -> tuple[list[tuple[list[Ref], list[int]]], bool]:
    stream = []
    for ref, tokens in samples:
        if len(tokens) > batching.seq_len and batching.overflow == "drop":
            continue
        kept = tokens[: batching.seq_len] if batching.overflow == "truncate" else tokens
        stream += [(ref, token) for token in kept]
    size = batching.seq_len * batching.rows
    parts = [stream[at : at + size] for at in range(0, len(stream), size)]
    groups = [(list(dict.fromkeys(ref for ref, _ in part)), [token for _, token in part]) for part in parts]
    return groups, bool(parts) and len(parts[-1]) == size


# What comes out


class Step(NamedTuple):
    """One micro-batch in comparable form with the rank's state as of its delivery."""

    batch: tuple[int, int, list[Ref], list[int]]
    turn: int
    lanes: dict[str, Json]
    state: str


def tokens_of(group: Group) -> list[int]:
    tokens: list[int] = []
    for sample in group.samples:
        for piece in sample.pieces if isinstance(sample, PackedRow) else [sample]:
            tokens += piece["input_ids"]
    return tokens


def view(batch: LaneBatch) -> tuple[int, int, list[Ref], list[int]]:
    return batch.lane, batch.epoch, [item.ref for item in batch.group.items], tokens_of(batch.group)


class Drive:
    """Runs a rank from a state: reads spans, cuts chunks, runs ahead and delivers late, all at random."""

    def __init__(self, case: Case, dp_rank: int, state: Json, seed: int) -> None:
        self.case = case
        self.slots = Slots(7)
        self.state = state
        self.ended: Json = None
        plan = case.plan(dp_rank)
        self.progress = Progress(Run(state=state, end_epoch=case.num_epochs))
        self.assembler = Assembler(plan.lanes, plan.batching, state, self.slots, keep_partial=plan.keep_partial)
        self._plan = plan
        self._random = random.Random(seed)
        self._ready: deque[int] = deque()

    def steps(self) -> Iterator[Step]:
        source = self.state["source"]
        position = source["position"]
        assert source["cursor"] == (position or None)
        for epoch in range(source["epoch"], self.case.num_epochs):
            lookahead = self._random.choice([0, 1, 3, 100])
            waiting: deque[tuple[Stamps, Chunk]] = deque()
            for work in self._read(epoch, position):
                waiting.append(work)
                while len(waiting) > lookahead:
                    yield from self._take(*waiting.popleft())
            while waiting:
                yield from self._take(*waiting.popleft())
            for row in self.held:
                self.assembler.drop_record(row[0])
            yield from self._deliver(self.assembler.end_epoch(epoch))
            position = 0
        self._receive(len(self._ready))
        self.ended = self.progress.next_pass(self.assembler)

    def _read(self, epoch: int, position: int) -> Iterator[tuple[Stamps, Chunk]]:
        plan, queue = self._plan, Queue()
        stamper = Stamper(plan.lanes, plan.batching, self.state, epoch=epoch, position=position, even=not plan.keep_partial)
        self.held = stamper.held
        while position < len(self.case.records):
            stop = min(len(self.case.records), position + self._random.randint(1, 9))
            unused = self._random.randint(0, 3)
            self.slots.start(stop - position + unused)
            self.progress.cursors.add((epoch, stamper.position), position or None)
            ids: list[RecordId] = [("shard", row) for row in range(position, stop)]
            passed = stamper.stamp(Span([self.case.samples(row) for row in range(position, stop)], ids), queue)
            self.slots.drop(unused + passed)
            position = stop
            while len(queue) > self._random.choice([0, 0, 5]):
                yield queue.cut(epoch, self._random.randint(1, 6))
        while len(queue):
            yield queue.cut(epoch, self._random.randint(1, 6))
        self.progress.cursors.add((epoch, stamper.position), position or None)
        self.slots.drop(len(stamper.held))

    def _take(self, stamps: Stamps, chunk: Chunk) -> Iterator[Step]:
        counts: Sequence[int] | None = [len(samples) for samples in chunk.records]
        if all(count == 1 for count in counts or ()):
            counts = None
        samples = [sample for record in chunk.records for sample in record]
        yield from self._deliver(self.assembler.take(stamps, Outcome(len(chunk.records), counts, samples, None)))

    def _deliver(self, turns: Iterator[Turn]) -> Iterator[Step]:
        for turn in turns:
            state = {**self.state, **self.progress.state_after(turn, 0)}
            assert turn.place == self._oldest_place(turn.lanes)
            self._ready.append(turn.batch.num_records)
            self.check_slots()
            self._receive(self._random.randint(0, len(self._ready)))
            yield Step(view(turn.batch), turn.turn, json.loads(json.dumps(turn.lanes)), json.dumps(state))
        self.check_slots()

    def _oldest_place(self, lanes: dict[str, Json]) -> tuple[int, int]:
        """Return the first record that a rank with these lane states needs again."""
        plan = self._plan
        return min((state["epoch"], plan.lanes.position(int(lane), oldest_seq(plan.batching, state))) for lane, state in lanes.items())

    def _receive(self, num_batches: int) -> None:
        for _ in range(num_batches):
            self.slots.deliver(self._ready.popleft())
        self.check_slots()

    def check_slots(self) -> None:
        slots = self.slots
        assert min(slots.working, slots.open, slots.ready) >= 0, (slots.working, slots.open, slots.ready)
        assert slots.ready == sum(self._ready)
