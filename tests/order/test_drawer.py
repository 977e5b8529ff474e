from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.errors import ConfigError
from aioloader.order.apportion import WEIGHT
from aioloader.order.drawer import RecordDrawer, TokenDrawer
from aioloader.order.mixture import Mixture
from aioloader.order.schedule import Ramp, Steps

NAMES = "abcdefgh"


def entries(*weights: float) -> dict[str, tuple[Any, float]]:
    return {name: (None, weight) for name, weight in zip(NAMES, weights, strict=False)}


def by_name(*weights: float) -> dict[str, float]:
    return dict(zip(NAMES, weights, strict=False))


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def read_records(
    mixture: Mixture, sizes: Sequence[int], num: int, block: int, drawer: RecordDrawer | None = None
) -> list[tuple[int, int, int]]:
    """Read up to `num` records of an epoch as a reader does: (source, pass, row) of each."""
    drawer = drawer or RecordDrawer(mixture)
    records: list[tuple[int, int, int]] = []
    rows = [0] * len(sizes)
    while len(records) < num:
        sources = drawer.draw(min(block, num - len(records)))
        if not sources:
            return records
        for index, source in enumerate(sources):
            if rows[source] == sizes[source]:
                drawer.take_back(sources[index:])
                assert drawer.position == len(records)
                if drawer.exhausted(source) == "stop":
                    return records
                rows[source] = 0
                break
            records.append((source, drawer.passes[source], rows[source]))
            rows[source] += 1
    return records


SCHEDULES = [None, Steps([(20, by_name(1, 0, 1)), (35, by_name(1, 5, 1))]), Ramp([(30, by_name(0, 1, 5)), (50, by_name(3, 1, 1))])]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_record_draws_go_on_from_the_state_at_every_position(schedule: Steps | Ramp | None) -> None:
    mixture = Mixture(entries(0.5, 0.3, 0.2), schedule=schedule)
    whole = RecordDrawer(mixture).draw(80)
    for position in range(80):
        drawer = RecordDrawer(mixture)
        drawer.draw(position)
        state = through_json(drawer.state())
        assert RecordDrawer(mixture, state).draw(80 - position) == whole[position:]
        assert RecordDrawer(mixture, state).state() == state


def test_the_state_of_records_is_small_and_by_name() -> None:
    drawer = RecordDrawer(Mixture(entries(1, 3)))
    drawer.draw(8)
    assert drawer.state() == {
        "weigh": "records",
        "position": 8,
        "drawn": {"a": 2, "b": 6},
        "passes": {"a": 0, "b": 0},
        "since": {"position": 0, "drawn": {"a": 0, "b": 0}},
        "changes": [],
    }


@pytest.mark.parametrize("block", [1, 7, 64])
def test_first_exhausted_stops_where_a_source_is_drawn_that_has_nothing_left(block: int) -> None:
    records = read_records(Mixture(entries(1, 1)), [5, 100], 50, block)
    assert [source for source, _, _ in records].count(0) == 5
    assert records == read_records(Mixture(entries(1, 1)), [100, 100], 50, 1)[: len(records)]
    assert len(records) == 10


@pytest.mark.parametrize("block", [1, 7, 64])
def test_all_exhausted_repeats_the_short_until_the_long_is_through(block: int) -> None:
    records = read_records(Mixture(entries(1, 1), stop="all_exhausted"), [5, 12], 100, block)
    assert [record for record in records if record[0] == 1] == [(1, 0, row) for row in range(12)]
    # That the long one has nothing left shows where it is drawn for the 13th time.
    assert [record for record in records if record[0] == 0] == [(0, row // 5, row % 5) for row in range(13)]


def test_repeat_never_ends() -> None:
    records = read_records(Mixture(entries(1, 3), stop="repeat"), [4, 5], 1000, 16)
    assert len(records) == 1000
    assert records[-1][1] == 750 // 5 - 1


@pytest.mark.parametrize("block", [1, 7, 64])
def test_a_source_with_no_passes_left_gives_its_weight_to_the_others(block: int) -> None:
    mixture = Mixture(entries(5, 3, 2), stop="repeat", repeats={"a": 2})
    records = read_records(mixture, [20, 7, 7], 400, block)
    sources = [source for source, _, _ in records]
    assert [record for record in records if record[0] == 0] == [(0, row // 20, row % 20) for row in range(40)]
    last = max(position for position, source in enumerate(sources) if source == 0)
    assert 78 <= last <= 81
    for stop in range(last + 3, 400):
        after = sources[last + 1 : stop]
        assert abs(after.count(1) - 0.6 * len(after)) < 2


@pytest.mark.parametrize("position", [0, 37, 81, 82, 150])
def test_draws_go_on_from_the_state_after_a_source_was_left_out(position: int) -> None:
    mixture = Mixture(entries(5, 3, 2), stop="repeat", repeats={"a": 1})
    drawer = RecordDrawer(mixture)
    drawer.draw(80)
    assert drawer.exhausted(0) == "leave out"
    drawer.draw(position)
    resumed = RecordDrawer(mixture, through_json(drawer.state()))
    assert resumed.drawn == drawer.drawn
    assert resumed.draw(50) == drawer.draw(50)
    assert resumed.exhausted(1) == "repeat"
    assert resumed.passes == (1, 1, 0)


def test_draws_end_where_only_a_source_that_was_left_out_has_a_weight() -> None:
    mixture = Mixture(entries(1, 1), schedule=Steps([(30, by_name(1, 0))]), stop="repeat", repeats={"a": 1})
    drawer = RecordDrawer(mixture)
    drawer.draw(10)
    drawer.exhausted(0)
    assert drawer.draw(100) == [1] * 20
    assert drawer.draw(100) == []


def draw_tokens(drawer: TokenDrawer, lengths: Sequence[int]) -> list[int]:
    sources = []
    for length in lengths:
        source = drawer.next_source()
        assert source is not None
        drawer.note(source, length)
        sources.append(source)
    return sources


def by_tokens(*weights: float, **options: Any) -> Mixture:
    return Mixture(entries(*weights), weigh="tokens", length=len, **options)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 100), min_size=2, max_size=8),
    st.lists(st.integers(0, 3000), min_size=1, max_size=300),
)
def test_tokens_stay_near_their_share_at_every_prefix(weights: list[int], lengths: list[int]) -> None:
    drawer = TokenDrawer(by_tokens(*weights))
    behind_by = sum(Fraction(1, k) for k in range(1, len(weights))) * max(lengths)
    for length in lengths:
        draw_tokens(drawer, [length])
        for tokens, weight in zip(drawer.tokens, weights, strict=True):
            behind = Fraction(weight * drawer.num_tokens, sum(weights)) - tokens
            rounding = Fraction(drawer.num_tokens, WEIGHT)
            assert -max(lengths) - rounding <= behind <= behind_by + rounding


def test_tokens_follow_a_ramp_over_consumed_tokens() -> None:
    schedule = Ramp([(100_000, by_name(1, 0))], unit="tokens")
    drawer = TokenDrawer(by_tokens(0, 1, schedule=schedule))
    lengths = np.random.default_rng(0).integers(1, 200, 1500)
    draw_tokens(drawer, lengths.tolist())
    ramped = 50_000 + (drawer.num_tokens - 100_000)
    assert drawer.num_tokens > 110_000
    assert abs(drawer.tokens[0] - ramped) < 400  # a record's length, and half of one for the ramp
    assert sum(drawer.tokens) == drawer.num_tokens


def test_tokens_follow_steps_over_positions_and_sources_without_weight_are_not_drawn() -> None:
    schedule = Steps([(0, by_name(1, 1, 0)), (50, by_name(0, 0, 1)), (60, by_name(1, 0, 3))])
    sources = draw_tokens(TokenDrawer(by_tokens(1, 1, 1, schedule=schedule)), [3, 8, 5, 1, 9] * 40)
    assert set(sources[:50]) == {0, 1}
    assert set(sources[50:60]) == {2}
    assert set(sources[60:]) == {0, 2}


@settings(max_examples=20)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.sampled_from(["records", "tokens"]), st.data())
def test_token_draws_go_on_from_the_state_at_any_position(lengths: list[int], unit: Any, data: st.DataObject) -> None:
    mixture = by_tokens(5, 3, 2, schedule=Ramp([(40, by_name(1, 1, 8))], unit=unit), stop="repeat", repeats={"b": 1})
    drawer = TokenDrawer(mixture)
    stop = data.draw(st.integers(0, len(lengths)))
    draw_tokens(drawer, lengths[: stop // 2])
    if data.draw(st.booleans()):
        assert drawer.exhausted(1) == "leave out"
    draw_tokens(drawer, lengths[stop // 2 : stop])
    state = through_json(drawer.state())
    resumed = TokenDrawer(mixture, state)
    assert resumed.state() == state
    assert draw_tokens(resumed, lengths[stop:]) == draw_tokens(drawer, lengths[stop:])
    assert resumed.state() == drawer.state()


def test_the_order_and_state_by_tokens_are_pinned() -> None:
    drawer = TokenDrawer(Mixture({"code": (None, 0.3), "web": (None, 0.7)}, weigh="tokens", length=len))
    assert draw_tokens(drawer, [7 * i % 11 + 1 for i in range(16)]) == [1, 0, 1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 0, 1, 0]
    assert drawer.state() == {
        "weigh": "tokens",
        "position": 16,
        "num_tokens": 97,
        "drawn": {"code": 6, "web": 10},
        "tokens": {"code": 33, "web": 64},
        "deficits": {"code": -4288095348307, "web": 4288095348307},
        "passes": {"code": 0, "web": 0},
        "since": 0,
        "changes": [],
    }


def test_a_source_left_out_gives_its_tokens_to_the_others() -> None:
    drawer = TokenDrawer(by_tokens(5, 3, 2, stop="repeat", repeats={"a": 1}))
    draw_tokens(drawer, [10] * 100)
    before = drawer.tokens
    assert drawer.exhausted(0) == "leave out"
    draw_tokens(drawer, [10] * 100)
    assert [now - then for now, then in zip(drawer.tokens, before, strict=True)] == [0, 600, 400]
    assert drawer.exhausted(1) == "repeat"
    assert (drawer.passes, drawer.position, drawer.drawn) == ((1, 1, 0), 200, (50, 90, 60))


def test_no_source_is_next_where_none_has_a_weight() -> None:
    mixture = by_tokens(1, 1, schedule=Steps([(50, by_name(1, 0)), (55, by_name(1, 1))], unit="tokens"), stop="repeat", repeats={"a": 1})
    drawer = TokenDrawer(mixture)
    assert drawer.exhausted(0) == "leave out"
    assert draw_tokens(drawer, [20, 20, 20]) == [1, 1, 1]
    assert drawer.next_source() is None
    assert TokenDrawer(mixture, through_json(drawer.state())).next_source() is None


def test_lengths_may_be_numpy_integers_and_leave_the_state_json() -> None:
    drawer = TokenDrawer(by_tokens(1, 1))
    drawer.note(0, np.int64(2**40))
    state = drawer.state()
    assert through_json(state) == state
    assert state["deficits"] == {"a": -(2**79), "b": 2**79}


@pytest.mark.parametrize("length", [-1, 2.0, True, None])
def test_a_length_that_is_no_count_is_refused(length: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"Mixture\(length=\): expected an int >= 0 for every record, got {length!r}; return its token count"
    ):
        TokenDrawer(by_tokens(1, 1)).note(0, length)
