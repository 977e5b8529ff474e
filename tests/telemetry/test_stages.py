"""Stages: counters that only grow, as plain data."""

from __future__ import annotations

import json
import pickle

from hypothesis import given
from hypothesis import strategies as st

from aioloader.telemetry import Stage, Stages

events = st.lists(st.tuples(st.integers(0, 100), st.floats(0, 10), st.floats(-1, 10)))


@given(events=events)
def test_counts_and_times_add_up_and_waits_are_never_negative(events: list[tuple[int, float, float]]) -> None:
    stage = Stage()
    for count, service_s, wait_s in events:
        before = stage.snapshot(10.0)
        stage.add(count, service_s, wait_s)
        assert all(after >= before[name] for name, after in stage.snapshot(10.0).items())
    assert stage.count == sum(count for count, _, _ in events)
    assert stage.wait_s == sum(max(0.0, wait_s) for _, _, wait_s in events)


def test_waiting_alone() -> None:
    stage = Stage()
    stage.add(3, 0.5)
    stage.add_wait(0.25)
    assert stage.snapshot(10.0) == {"count": 3, "service_s": 0.5, "wait_s": 0.25, "rate_per_s": 0.3, "occupancy": 0.05}


def test_a_snapshot_is_plain_data_in_the_order_of_the_flow() -> None:
    stages = Stages()
    stages.order.add_wait(1.0)
    snapshot = stages.snapshot(10.0)
    assert list(snapshot) == ["source", "preprocess", "order", "batch", "bridge"]
    assert json.loads(json.dumps(snapshot)) == pickle.loads(pickle.dumps(snapshot)) == snapshot
    stages.order.add_wait(1.0)
    assert snapshot["order"]["wait_s"] == 1.0
    assert Stages().snapshot(10.0)["order"]["wait_s"] == 0.0
