from __future__ import annotations

import json
from typing import Any

import pytest

from aioloader.errors import ResumeError
from aioloader.order.adoption import adopt
from aioloader.order.drawer import RecordDrawer, TokenDrawer
from aioloader.order.mixture import Mixture


def mixture(**weights: float) -> Mixture:
    return Mixture({name: (None, weight) for name, weight in weights.items()}, stop="repeat")


def token_mixture(**weights: float) -> Mixture:
    return Mixture({name: (None, weight) for name, weight in weights.items()}, stop="repeat", weigh="tokens", length=len)


def saved_records() -> Any:
    drawer = RecordDrawer(mixture(code=3, web=7))
    drawer.draw(101)
    drawer.exhausted(0)
    return json.loads(json.dumps(drawer.state()))


def saved_tokens() -> Any:
    drawer = TokenDrawer(token_mixture(code=3, web=7))
    for length in (5, 9, 2, 11):
        drawer.note(drawer.next_source() or 0, length)
    return json.loads(json.dumps(drawer.state()))


def test_a_state_that_fits_is_returned_as_it_is() -> None:
    state = saved_records()
    assert adopt(state, mixture(code=3, web=7), added={"math"}, removed={"books"}) is state


def test_each_difference_that_was_not_accepted_is_named() -> None:
    with pytest.raises(ResumeError, match="come or go") as caught:
        adopt(saved_records(), mixture(web=7, math=1, books=1), added={"books"})
    assert caught.value.differences == (
        ("source 'math' of the mixture", "absent", "present"),
        ("source 'code' of the mixture", "present", "absent"),
    )
    with pytest.raises(ResumeError, match=r"source 'math' of the mixture: expected 'present' \(this loader\), got 'absent' \(the state\)"):
        RecordDrawer(mixture(code=3, web=7, math=1), saved_records())
    with pytest.raises(ResumeError, match="source 'code' of the mixture: expected 'absent'"):
        TokenDrawer(token_mixture(web=7), saved_tokens())


def test_a_mixture_that_weighs_differently_is_refused() -> None:
    with pytest.raises(ResumeError, match="weigh of the mixture: expected 'records'"):
        RecordDrawer(mixture(code=3, web=7), saved_tokens())


def test_a_source_that_is_added_begins_at_nothing_and_catches_nothing_up() -> None:
    grown = mixture(code=3, web=7, math=10)
    state = adopt(saved_records(), grown, added={"math"})
    assert state["changes"] == [{"position": 101, "added": ["math"], "removed": {}, "reweighted": False}]
    drawer = RecordDrawer(grown, json.loads(json.dumps(state)))
    assert (drawer.position, drawer.drawn, drawer.passes) == (101, (30, 71, 0), (1, 0, 0))
    counts = [0, 0, 0]
    for num, source in enumerate(drawer.draw(400), start=1):
        counts[source] += 1
        assert all(abs(count - num * weight / 20) < 1 for count, weight in zip(counts, (3, 7, 10), strict=True))
    again = RecordDrawer(grown, json.loads(json.dumps(drawer.state())))
    assert again.draw(50) == drawer.draw(50)


def test_a_source_that_is_removed_is_kept_in_the_record_of_the_change() -> None:
    shrunk = mixture(web=7, books=3)
    state = adopt(saved_records(), shrunk, added={"books"}, removed={"code"})
    assert state["changes"] == [{"position": 101, "added": ["books"], "removed": {"code": 30}, "reweighted": False}]
    drawer = RecordDrawer(shrunk, state)
    sources = drawer.draw(100)
    assert (sources.count(0), sources.count(1)) == (70, 30)
    assert drawer.state()["changes"] == state["changes"]
    with pytest.raises(ResumeError, match="source 'code' of the mixture"):
        RecordDrawer(mixture(code=3, web=7), drawer.state())


def test_other_weights_that_are_meant_count_from_here() -> None:
    turned = mixture(code=7, web=3)
    state = adopt(saved_records(), turned, reweighted=True)
    assert state["changes"] == [{"position": 101, "added": [], "removed": {}, "reweighted": True}]
    sources = RecordDrawer(turned, state).draw(100)
    assert (sources.count(0), sources.count(1)) == (70, 30)


def test_changes_add_up_and_the_state_given_is_left_alone() -> None:
    state = saved_records()
    before = json.dumps(state)
    once = adopt(state, mixture(code=3, web=7, math=1), added={"math"})
    twice = adopt(once, mixture(web=7, math=1), removed={"code"})
    assert [change["added"] for change in twice["changes"]] == [["math"], []]
    assert json.dumps(state) == before


def test_tokens_are_counted_afresh_and_positions_go_on() -> None:
    grown = token_mixture(web=7, math=3)
    state = adopt(saved_tokens(), grown, added={"math"}, removed={"code"})
    drawer = TokenDrawer(grown, state)
    assert (drawer.position, drawer.num_tokens) == (4, 27)
    assert (drawer.state()["deficits"], drawer.state()["since"]) == ({"web": 0, "math": 0}, 4)
    web, math = drawer.tokens
    for _ in range(100):
        drawer.note(drawer.next_source() or 0, 10)
    assert [drawer.tokens[0] - web, drawer.tokens[1] - math] == [700, 300]
