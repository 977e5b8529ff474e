"""Progress: the state as of each micro-batch, where a pass ends, and passes that give nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioloader.batching import FixedBatch
from aioloader.engine.assembler import Assembler, Stamps
from aioloader.engine.plan import Run
from aioloader.engine.progress import Progress
from aioloader.errors import SourceError
from aioloader.pools.chunk import Outcome
from aioloader.protocols import Json
from aioloader.runtime.budget import Slots
from tests.engine.lane_cases import Case

CASE = Case(records=[], num_lanes=2, dp_size=1, batching=FixedBatch(2), keep_partial=False, num_epochs=1)


def start(*, end_epoch: int | None, epoch: int = 0, resumed: bool = False) -> tuple[Progress, Assembler]:
    state = CASE.fresh(0)
    state["source"]["epoch"] = epoch
    for lane in state["lanes"].values():
        lane["epoch"] = epoch
    plan = CASE.plan(0)
    assembler = Assembler(plan.lanes, plan.batching, state, Slots(10), keep_partial=False)
    return Progress(Run(state=state, end_epoch=end_epoch, resumed=resumed)), assembler


def fed(assembler: Assembler, first: int, stop: int) -> Any:
    """Feed records `first` to `stop - 1` and return the turns."""
    rows = range(first, stop)
    stamps = Stamps([row % 2 for row in rows], [row // 2 for row in rows], [("shard", row) for row in rows])
    return assembler.take(stamps, Outcome(len(rows), None, [{"input_ids": [row]} for row in rows], None))


def test_a_state_refers_to_the_last_cursor_before_what_it_needs() -> None:
    progress, assembler = start(end_epoch=1)
    for position in (0, 3, 5, 20):
        progress.cursors.add((0, position), {"at": position} if position else None)
    states = [progress.state_after(turn, 5) for turn in fed(assembler, 0, 8)]
    assert [state["source"]["position"] for state in states] == [0, 3, 5, 5]
    assert [state["source"]["cursor"] for state in states] == [None, {"at": 3}, {"at": 5}, {"at": 5}]
    assert [state["turn"] for state in states] == [1, 0, 1, 0]
    assert all(state["end_epoch"] == 1 and json.loads(json.dumps(state)) == state for state in states)


def test_a_state_does_not_change_when_the_run_goes_on() -> None:
    progress, assembler = start(end_epoch=1)
    progress.cursors.add((0, 0), None)
    seen: list[tuple[Json, str]] = []
    for turn in fed(assembler, 0, 20):
        state = progress.state_after(turn, 5)
        seen.append((state, json.dumps(state)))
    assert len(seen) == 10
    assert all(json.dumps(state) == text for state, text in seen)


def test_where_a_pass_ends() -> None:
    progress, _ = start(end_epoch=3, epoch=1)
    assert [progress.is_over(epoch) for epoch in range(5)] == [False, False, False, True, True]
    endless, _ = start(end_epoch=None)
    assert not endless.is_over(10**9)


def test_the_next_pass_starts_at_its_epoch_with_what_was_counted() -> None:
    progress, assembler = start(end_epoch=1)
    progress.cursors.add((0, 0), None)
    list(fed(assembler, 0, 5))
    list(assembler.end_epoch(0))
    state = progress.next_pass(assembler)
    assert state["source"] == {"epoch": 1, "position": 0, "cursor": None}
    assert (state["turn"], state["end_epoch"]) == (0, None)
    for lane, records, dropped in (("0", 3, 1), ("1", 2, 0)):
        assert (state["lanes"][lane]["epoch"], state["lanes"][lane]["seq"], state["lanes"][lane]["step"]) == (1, 0, 1)
        counts = state["lanes"][lane]["counts"]
        assert (counts["records"], counts["delivered_samples"], counts["dropped_samples"]) == (records, 2, dropped)


def test_what_waits_for_another_lane_at_the_end_is_dropped_and_counted() -> None:
    progress, assembler = start(end_epoch=1)
    stamps = Stamps([0] * 4, range(4), [("shard", row) for row in range(4)])
    assert list(assembler.take(stamps, Outcome(4, None, [{"input_ids": [row]} for row in range(4)], None))) == []
    assert assembler.num_blocked == 2
    counts = progress.next_pass(assembler)["lanes"]["0"]["counts"]
    assert (counts["samples"], counts["delivered_samples"], counts["dropped_samples"]) == (4, 0, 4)
    assert progress.next_pass(assembler)["lanes"]["0"]["step"] == 0


def test_an_endless_pass_that_gives_nothing_is_stopped() -> None:
    progress, _ = start(end_epoch=None, epoch=4)
    progress.check_epoch(4)  # a resumed pass may have nothing left in its first epoch
    with pytest.raises(SourceError, match="expected epoch 5 to give at least one micro-batch, got none, and would go on for ever"):
        progress.check_epoch(5)


def test_an_endless_pass_that_gives_something_goes_on() -> None:
    progress, _ = start(end_epoch=None)
    for epoch in range(5):
        progress.num_delivered += 1
        progress.check_epoch(epoch)
    with pytest.raises(SourceError, match="epoch 5"):
        progress.check_epoch(5)


@pytest.mark.parametrize(("resumed", "num_delivered", "follows"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_only_a_resumed_pass_with_nothing_left_is_followed_by_another(resumed: bool, num_delivered: int, follows: bool) -> None:
    progress, assembler = start(end_epoch=2, epoch=2, resumed=resumed)
    progress.num_delivered = num_delivered
    state = progress.next_pass(assembler)
    run = progress.following(state)
    assert (run is not None) == follows
    if run is not None:
        assert (run.state, run.end_epoch, run.resumed) == (state, 3, False)
