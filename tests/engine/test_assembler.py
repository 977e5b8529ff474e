"""Assembler, with everything in front of it: what a rank delivers, in which order, from which state, at what cost in slots."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aioloader.batching import FixedBatch, Pack
from aioloader.engine.assembler import Assembler, Stamps, fresh_rank_state
from aioloader.order.lanes import LaneMap
from aioloader.pools.chunk import Outcome
from aioloader.runtime.budget import Slots
from tests.engine.lane_cases import Case, Drive, cases, expected, view

properties = settings(max_examples=150)
seeds = st.integers(0, 10_000)


@properties
@given(case=cases, seed=seeds)
def test_every_rank_delivers_what_the_reference_says(case: Case, seed: int) -> None:
    for dp_rank in range(case.dp_size):
        drive = Drive(case, dp_rank, case.fresh(dp_rank), seed)
        assert [step.batch for step in drive.steps()] == expected(case, dp_rank)


@properties
@given(case=cases, seed=seeds)
def test_slots_are_never_negative_and_all_come_back(case: Case, seed: int) -> None:
    drive = Drive(case, 0, case.fresh(0), seed)
    for _ in drive.steps():
        pass
    assert (drive.slots.working, drive.slots.ready) == (0, 0)
    if not drive.assembler.num_blocked:
        assert drive.slots.open == 0
    assert 0 <= drive.slots.open <= len(case.records) * case.num_epochs


@properties
@given(case=cases, seed=seeds, data=st.data())
def test_a_resumed_rank_delivers_the_same_tail_with_the_same_states(case: Case, seed: int, data: st.DataObject) -> None:
    dp_rank = data.draw(st.integers(0, case.dp_size - 1))
    whole = Drive(case, dp_rank, case.fresh(dp_rank), seed)
    steps = list(whole.steps())
    for at in data.draw(st.sets(st.integers(0, len(steps) - 1), max_size=4)) if steps else ():
        again = Drive(case, dp_rank, json.loads(steps[at].state), seed + at)
        assert [(step.batch, step.turn, step.lanes) for step in again.steps()] == [
            (step.batch, step.turn, step.lanes) for step in steps[at + 1 :]
        ]
        assert again.ended == whole.ended
        if not again.assembler.num_blocked:
            assert again.slots.in_flight == 0


@properties
@given(case=cases, seed=seeds, data=st.data())
def test_a_run_resumed_again_and_again_is_the_same_run(case: Case, seed: int, data: st.DataObject) -> None:
    state, batches = case.fresh(0), []
    for _ in range(50):
        drive = Drive(case, 0, state, seed)
        num_steps = data.draw(st.integers(1, 5))
        for _, step in zip(range(num_steps), drive.steps(), strict=False):
            batches.append(step.batch)
            state = json.loads(step.state)
        if drive.ended:
            break
    assert batches == expected(case, 0)[: len(batches)]
    assert not drive.ended or len(batches) == len(expected(case, 0))


@properties
@given(case=cases, seed=seeds)
@example(Case(records=[[5]], num_lanes=1, dp_size=1, batching=Pack(2), keep_partial=True, num_epochs=1), 0)
def test_every_record_and_sample_is_counted_once(case: Case, seed: int) -> None:
    num_records = num_samples = 0
    for dp_rank in range(case.dp_size):
        drive = Drive(case, dp_rank, case.fresh(dp_rank), seed)
        last = list(drive.steps())[-1:]
        for counts in (lane["counts"] for lane in drive.ended["lanes"].values()):
            assert min(counts.values()) >= 0
            num_records += counts["records"] + counts["dropped_records"]
            num_samples += counts["samples"]
            assert counts["samples"] == (
                counts["delivered_samples"]
                + counts["dropped_samples"]
                + counts.get("batching_dropped_samples", 0)
                + counts.get("batching_empty_samples", 0)
            )
        delivered = sum(lane["counts"]["delivered_samples"] for lane in drive.ended["lanes"].values())
        assert not last or delivered == sum(lane["counts"]["delivered_samples"] for lane in last[0].lanes.values())
    assert num_records == len(case.records) * case.num_epochs
    assert num_samples <= sum(map(len, case.records)) * case.num_epochs


@given(case=cases, seed=seeds)
def test_states_are_small_and_of_one_shape(case: Case, seed: int) -> None:
    keys = set()
    for step in Drive(case, 0, case.fresh(0), seed).steps():
        state = json.loads(step.state)
        keys.add((tuple(state), *((tuple(lane), tuple(lane["counts"])) for lane in state["lanes"].values())))
        assert set(state["lanes"]) == {str(lane) for lane in case.lanes(0).served}
    assert len(keys) <= 1


def alone(records: list[list[int]], batching: FixedBatch | Pack) -> Case:
    return Case(records=records, num_lanes=1, dp_size=1, batching=batching, keep_partial=True, num_epochs=1)


@pytest.mark.parametrize(
    "case",
    [
        alone([[2, 0]], Pack(1)),  # between two groups of one sample, with another sample of the record to come
        alone([[3], [], [], [1]], Pack(1)),  # between two groups, with records to come that give nothing
        alone([[1], [9, 1, 2], [4]], Pack(2)),
        alone([[1, 1, 1, 1], [], [1, 1, 1]], FixedBatch(2)),
        alone([[3]], Pack(1, rows=2, overflow="truncate")),  # at the end, with nothing left to read but counters to keep
    ],
)
def test_resume_at_awkward_places(case: Case) -> None:
    whole = Drive(case, 0, case.fresh(0), 0)
    steps = list(whole.steps())
    for at, step in enumerate(steps):
        again = Drive(case, 0, json.loads(step.state), 0)
        assert [(one.batch, one.lanes) for one in again.steps()] == [(one.batch, one.lanes) for one in steps[at + 1 :]]
        assert again.ended == whole.ended
        assert again.slots.in_flight == 0


# A failure ends the run early


@given(
    batch_size=st.integers(1, 4),
    num_lanes=st.integers(1, 3),
    num_records=st.integers(0, 14),
    num_chunk=st.integers(1, 5),
)
def test_everything_before_a_failure_is_delivered(batch_size: int, num_lanes: int, num_records: int, num_chunk: int) -> None:
    lanes, batching, slots = LaneMap(num_lanes=num_lanes), FixedBatch(batch_size), Slots(100)
    assembler = Assembler(lanes, batching, fresh_rank_state(batching, lanes, 0), slots, keep_partial=False)
    slots.start(num_records)
    turns = []
    for first in range(0, num_records, num_chunk):
        positions = range(first, min(num_records, first + num_chunk))
        places = [lanes.locate(position) for position in positions]
        stamps = Stamps([lane for lane, _ in places], [seq for _, seq in places], [("shard", position) for position in positions])
        turns += list(assembler.take(stamps, Outcome(len(positions), None, [{"input_ids": [position]} for position in positions], None)))
    turns += list(assembler.end_early())
    delivered = [position for turn in turns for position in view(turn.batch)[3]]
    assert sorted(delivered) == list(range(num_records))
    assert [(turn.batch.step, turn.batch.lane) for turn in turns] == sorted((turn.batch.step, turn.batch.lane) for turn in turns)
    assert all(len(turn.batch.group.items) == batch_size or not turn.batch.group.complete for turn in turns)
    assert (slots.working, slots.open, slots.ready) == (0, 0, num_records)


@pytest.mark.parametrize("counts", [None, [1, 1, 1]])
def test_an_outcome_that_failed_gives_what_was_done(counts: list[int] | None) -> None:
    lanes, batching, slots = LaneMap(num_lanes=1), FixedBatch(2), Slots(10)
    assembler = Assembler(lanes, batching, fresh_rank_state(batching, lanes, 0), slots, keep_partial=False)
    slots.start(5)
    stamps = Stamps([0] * 5, range(5), [("shard", row) for row in range(5)])
    turns = list(assembler.take(stamps, Outcome(3, counts, [{"input_ids": [row]} for row in range(3)], None)))
    assert [view(turn.batch)[3] for turn in turns] == [[0, 1]]
    assert [view(turn.batch)[3] for turn in assembler.end_early()] == [[2]]
    assert (slots.working, slots.open, slots.ready) == (2, 0, 3)
