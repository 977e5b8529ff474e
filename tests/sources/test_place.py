from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ConfigError, ResumeError, SourceError
from aioloader.protocols import Span
from aioloader.sources.place import StreamPlace, checked_state, number_records
from aioloader.sources.pull import Pulled

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(pulls=st.lists(st.integers(1, 9)), remembered=st.sets(st.integers(0, 9)))
def test_the_cursor_counts_from_the_last_state(pulls: list[int], remembered: set[int]) -> None:
    place = StreamPlace("shard", None)
    total = since = 0
    state = None
    for turn, size in enumerate(pulls):
        if turn in remembered:
            state, since = {"at": total}, 0
            place.remember(state)
        span = place.settle(Pulled(list(range(size))))
        assert span == Span(list(range(size)), [("shard", total + row) for row in range(size)])
        total, since = total + size, since + size
    cursor = place.cursor()
    assert cursor == {"count": total, "state": state, "skip": since, "end": False}
    assert StreamPlace("shard", json.loads(json.dumps(cursor))).cursor() == cursor


def test_a_failure_is_raised_by_the_call_after_the_records_and_by_every_later_one() -> None:
    place = StreamPlace("shard", None)
    assert place.settle(Pulled([1, 2], failure=ValueError("boom"))) == Span([1, 2], [("shard", 0), ("shard", 1)])
    assert not place.is_live
    for _ in range(2):
        with pytest.raises(SourceError, match=r"record shard\[2\].*ValueError: boom"):
            place.finish()
    with pytest.raises(SourceError, match=r"record shard\[0\]"):
        StreamPlace("shard", None).settle(Pulled([], failure=ValueError("boom")))


def test_the_end_is_kept_in_the_cursor() -> None:
    place = StreamPlace("shard", None)
    assert place.settle(Pulled([1], ended=True)) is not None
    again = StreamPlace("shard", place.cursor())
    assert not again.is_live
    again.finish()


@pytest.mark.parametrize(
    "cursor",
    [3, [], {}, {"count": 1}, {"count": 1, "state": None, "skip": 2, "end": False}, {"count": 1, "state": None, "skip": 1, "end": 0}],
)
def test_other_cursors_are_refused(cursor: Any) -> None:
    with pytest.raises(ResumeError, match="cursor of source shard"):
        StreamPlace("shard", cursor)


@given(JSON.filter(lambda state: state is not None))
def test_json_states_are_copied(state: Any) -> None:
    copy = checked_state("here", state)
    assert copy == state
    assert copy is not state or not isinstance(state, (list, dict))


@pytest.mark.parametrize("state", [None, (1, 2), {"a": (1,)}, {1: 2}, {"a": {3}}, {"a": b"x"}, {"a": object()}, {"a": float("nan")}])
def test_states_that_json_would_change_are_refused(state: Any) -> None:
    with pytest.raises(ConfigError, match=r"here\.state_dict\(\): expected a state of dicts"):
        checked_state("here", state)


def test_records_are_numbered() -> None:
    assert number_records("shard", 2, 4) == [("shard", 2), ("shard", 3)]
    assert number_records("shard", 2, 2) == []
