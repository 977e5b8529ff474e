"""Waits: the cause that took longest is the cause, and nothing of it is left for the next micro-batch."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.telemetry.waits import CAUSES, CONSUMER, WaitCauses, Waits


@pytest.mark.parametrize(
    ("is_held_up", "has_work", "cause"),
    [(False, False, "source"), (False, True, "cpu"), (True, True, "order"), (True, False, "order")],
)
def test_what_was_missing_is_the_cause(is_held_up: bool, has_work: bool, cause: str) -> None:
    causes = WaitCauses()
    causes.add(0.1, is_held_up=is_held_up, has_work=has_work)
    assert CAUSES[causes.take()] == cause


def test_the_longest_of_several_counts_and_is_forgotten_then() -> None:
    causes = WaitCauses()
    causes.add(0.1, is_held_up=False, has_work=True)
    causes.add(0.3, is_held_up=False, has_work=False)
    causes.add(0.1, is_held_up=False, has_work=True)
    assert CAUSES[causes.take()] == "source"
    assert CAUSES[causes.take()] == "cpu"


@given(batches=st.lists(st.tuples(st.integers(0, CONSUMER), st.floats(0, 10)), max_size=30))
def test_every_batch_and_every_second_has_one_cause(batches: list[tuple[int, float]]) -> None:
    waits = Waits()
    for cause, seconds in batches:
        waits.add(cause, seconds)
    found = waits.snapshot()
    assert json.loads(json.dumps(found)) == found
    assert sum(entry["batches"] for entry in found.values()) == len(batches)
    assert waits.total_s == pytest.approx(sum(seconds for _, seconds in batches))
