"""Lane: micro-batches and states of one stream, record by record or in runs, and what counts as done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.batching import FixedBatch, Pack
from aioloader.engine.lane import Lane, LaneBatch, fresh_lane_state, oldest_seq
from aioloader.errors import BatchError
from aioloader.protocols import Json

Record = list[dict[str, list[int]]]


def records_of(lengths: list[list[int]]) -> list[Record]:
    return [
        [{"input_ids": [(seq * 10 + sub) * 100 + number for number in range(length)]} for sub, length in enumerate(samples)]
        for seq, samples in enumerate(lengths)
    ]


def drive(lane: Lane, records: list[Record], first: int = 0) -> Iterator[LaneBatch]:
    for seq in range(first, len(records)):
        yield from lane.take(seq, ("shard", seq), records[seq])
    yield from lane.end_epoch(0)


def plain(batch: LaneBatch) -> Any:
    return batch.step, batch.epoch, [item.ref for item in batch.group.items], batch.group.complete, json.dumps(batch.state)


batchings = st.one_of(st.builds(FixedBatch, st.integers(1, 4)), st.builds(Pack, st.integers(1, 5), rows=st.integers(1, 2)))
lengths_lists = st.lists(st.lists(st.integers(1, 7), max_size=3), max_size=15)


@given(batching=batchings, lengths=lengths_lists, keep_partial=st.booleans())
def test_resume_after_any_batch_gives_the_same_tail(batching: FixedBatch | Pack, lengths: list[list[int]], keep_partial: bool) -> None:
    records = records_of(lengths)
    whole = list(drive(Lane(0, batching, fresh_lane_state(batching, 0), keep_partial=keep_partial), records))
    for at, batch in enumerate(whole):
        state = json.loads(json.dumps(batch.state))
        lane = Lane(0, batching, state, keep_partial=keep_partial)
        assert lane.state() == state
        if state["epoch"] == 0:
            needed = {seq for seq, _ in batching.start().refs(state["batcher"])} | set(range(state["seq"], len(records)))
            assert min(needed, default=state["seq"]) == oldest_seq(batching, state)
            rest = [one for seq in sorted(needed) for one in lane.take(seq, ("shard", seq), records[seq])]
        else:
            rest = []
        rest += lane.end_epoch(0)
        assert [plain(one) for one in rest] == [plain(one) for one in whole[at + 1 :]]


@given(batching=batchings, lengths=lengths_lists, keep_partial=st.booleans())
def test_records_are_done_once_with_their_last_sample(batching: FixedBatch | Pack, lengths: list[list[int]], keep_partial: bool) -> None:
    lane = Lane(0, batching, fresh_lane_state(batching, 0), keep_partial=keep_partial)
    done = 0
    for seq, record in enumerate(records_of(lengths)):
        for batch in lane.take(seq, ("shard", seq), record):
            assert batch.num_records >= 0
            done += batch.num_records
        assert lane.num_open + done == sum(map(bool, lengths[: seq + 1]))
        assert 0 <= lane.num_open <= seq + 1
    before = lane.num_open
    assert sum(batch.num_records for batch in lane.end_epoch(0)) in ({before} if keep_partial else {0, before})
    assert lane.num_open == 0


@given(batch_size=st.integers(1, 5), runs=st.lists(st.integers(1, 9), max_size=8))
def test_a_run_of_records_is_the_same_as_one_by_one(batch_size: int, runs: list[int]) -> None:
    batching = FixedBatch(batch_size)
    records = records_of([[1]] * (1 + sum(runs)))
    one = Lane(0, batching, fresh_lane_state(batching, 0), keep_partial=True)
    other = Lane(0, batching, fresh_lane_state(batching, 0), keep_partial=True)
    assert not other.takes_runs
    expected = list(drive(one, records))
    batches = list(other.take(0, ("shard", 0), records[0]))
    assert other.takes_runs
    at = 1
    for run in runs:
        seqs = range(at, at + run)
        batches += other.take_run(seqs, [("shard", seq) for seq in seqs], [records[seq][0] for seq in seqs])
        at += run
    batches += other.end_epoch(0)
    assert [plain(batch) for batch in batches] == [plain(batch) for batch in expected]
    assert [batch.num_records for batch in batches] == [batch.num_records for batch in expected]


def test_batches_are_formed_lazily_with_the_state_as_of_each() -> None:
    batching = Pack(2)
    lane = Lane(3, batching, fresh_lane_state(batching, 0), keep_partial=True)
    states: list[Json] = []
    for batch in lane.take(0, ("shard", 0), [{"input_ids": [1, 2, 3, 4, 5]}, {"input_ids": [6]}]):
        states.append(batch.state)
        assert (batch.lane, batch.step) == (3, len(states) - 1)
    assert [(state["seq"], state["sub"], state["batcher"]["spans"]) for state in states] == [
        (0, 1, [[0, 0, 2, 5]]),
        (0, 1, [[0, 0, 4, 5]]),
        (1, 0, []),
    ]
    assert [state["counts"]["delivered_samples"] for state in states] == [0, 0, 2]


def test_an_epoch_ends_with_or_without_what_is_not_full() -> None:
    for keep_partial, sizes, counts in [(True, [2, 1], (3, 0)), (False, [2], (2, 1))]:
        lane = Lane(0, FixedBatch(2), fresh_lane_state(FixedBatch(2), 0), keep_partial=keep_partial)
        batches = list(drive(lane, records_of([[1]] * 3)))
        assert [len(batch.group.items) for batch in batches] == sizes
        state = lane.state()
        assert (state["epoch"], state["seq"], state["sub"], state["batcher"]) == (1, 0, 0, {"refs": []})
        assert (state["counts"]["delivered_samples"], state["counts"]["dropped_samples"]) == counts
        assert [batch.epoch for batch in batches] == [0] * len(sizes)


def test_a_lane_that_is_an_epoch_ahead_waits() -> None:
    state = fresh_lane_state(FixedBatch(1), 2)
    lane = Lane(0, FixedBatch(1), state, keep_partial=True)
    assert list(lane.end_epoch(1)) == []
    assert lane.state() == state
    assert list(lane.end_epoch(2)) == []
    assert lane.state()["epoch"] == 3


def test_a_sample_that_cannot_be_batched_leaves_everything_before_it() -> None:
    batching = Pack(3, overflow="error")
    lane = Lane(0, batching, fresh_lane_state(batching, 0), keep_partial=False)
    assert list(lane.take(0, ("shard", 0), [{"input_ids": [1, 2]}])) == []
    with pytest.raises(BatchError, match=r"record shard\[1\], seq 1: Pack: expected at most seq_len=3 tokens, got 4"):
        list(lane.take(1, ("shard", 1), [{"input_ids": [1, 2, 3, 4]}]))
    (last,) = lane.end_early()
    assert [item.ref for item in last.group.items] == [(0, 0)]
    assert (last.state["seq"], last.state["sub"]) == (1, 0)


def test_counts() -> None:
    lane = Lane(0, FixedBatch(2), fresh_lane_state(FixedBatch(2), 0), keep_partial=False)
    lane.drop_record()
    list(drive(lane, records_of([[1], [], [1, 1], [], [1, 1]])))
    counts = lane.state()["counts"]
    assert {name: number for name, number in counts.items() if number} == {
        "records": 5,
        "filtered_records": 2,
        "samples": 5,
        "delivered_samples": 4,
        "dropped_samples": 1,
        "dropped_records": 1,
    }
    assert counts.keys() >= fresh_lane_state(FixedBatch(2), 0)["counts"].keys()
