from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.order.apportion import RECORD, Course
from aioloader.order.chairman import Chairman
from tests.order.mixture_cases import courses, exact_weights, farthest, leaving_course, make_course


def proven_bound(course: Course) -> Fraction:
    """Tijdeman's bound, and one unit of the whole numbers we count in."""
    return 1 - Fraction(1, 2 * max(course.num_sources, 2) - 2) + Fraction(1, RECORD)


@settings(max_examples=60)
@given(courses(zeros=False))
def test_counts_stay_within_the_proven_bound_at_every_prefix(course: Course) -> None:
    assert farthest(course, Chairman(course).draw(300)) <= proven_bound(course)


@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("num_sources", [1, 2, 3, 8])
def test_counts_stay_within_the_bound_over_thousands_of_positions(num_sources: int, ramp: bool) -> None:
    rng = random.Random(num_sources)
    knots = [(position, [rng.choice((1, 2, 7, 100, 10_000)) for _ in range(num_sources)]) for position in (0, 700, 701, 1500, 2600)]
    course = make_course(knots, ramp=ramp)
    assert farthest(course, Chairman(course).draw(4000)) <= proven_bound(course)


@settings(max_examples=100)
@given(courses(zeros=True))
def test_a_source_without_a_weight_is_never_drawn(course: Course) -> None:
    for position, source in enumerate(Chairman(course).draw(350)):
        assert exact_weights(course, source, position) > 0


@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("return_once", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_counts_stay_within_one_record_where_sources_come_and_leave(seed: int, return_once: bool, ramp: bool) -> None:
    course = leaving_course(random.Random(seed), ramp=ramp, return_once=return_once)
    assert farthest(course, Chairman(course).draw(200)) < 1


def test_what_is_left_of_pausing_sources_is_settled_before_they_pause() -> None:
    # By deadline alone 0 and 1 would come first, and nobody could be drawn at position 2 without going a whole record ahead.
    course = make_course([(0, [1, 1, 1, 1]), (2, [1, 1, 0, 0]), (3, [1, 1, 1, 1])], ramp=False)
    sources = Chairman(course).draw(200)
    assert sources[:4] == [2, 0, 1, 3]
    assert farthest(course, sources) < 1


@pytest.mark.parametrize("seed", range(60))
def test_pauses_at_random_keep_counts_within_two_records(seed: int) -> None:
    rng = random.Random(seed)
    num_sources, longest = rng.randint(2, 8), rng.choice((1, 5, 30))
    knots, position = [], 0
    for _ in range(10):
        knots.append((position, [rng.choice((0, 1, 5, 50)) for _ in range(num_sources - 1)] + [1]))
        position += rng.randint(1, longest)
    course = make_course(knots, ramp=bool(seed % 2))
    sources = Chairman(course).draw(200)
    assert farthest(course, sources) < 2
    assert all(exact_weights(course, source, position) for position, source in enumerate(sources))


def draw_by_definition(course: Course, num: int) -> list[int]:
    """Earliest deadline first with every window searched for position by position, in fractions."""
    margin = Fraction(RECORD // (2 * max(course.num_sources, 2) - 2) - 1, RECORD)
    counts = [0] * course.num_sources
    sources = []
    for position in range(num):
        allowed = []
        for source, count in enumerate(counts):
            # The lightest weight is 1 / 64, so 200 positions are more than a record takes.
            if course.target(source, position + 1) / RECORD >= count + margin:
                ahead = range(position, position + 200)
                due = next((p for p in ahead if course.target(source, p + 1) / RECORD >= count + 1 - margin), ahead.stop)
                allowed.append((due, source))
        source = min(allowed)[1]
        counts[source] += 1
        sources.append(source)
    return sources


@settings(max_examples=15)
@given(courses(zeros=False, max_length=10, heaviest=9))
def test_draws_are_those_of_the_definition(course: Course) -> None:
    assert Chairman(course).draw(60) == draw_by_definition(course, 60)


@settings(max_examples=40)
@given(courses(zeros=True, max_length=12), st.data())
def test_going_on_from_the_counts_at_any_position_gives_the_same_draws(course: Course, data: st.DataObject) -> None:
    whole = Chairman(course).draw(120)
    position = data.draw(st.integers(0, 100))
    counts = [whole[:position].count(source) for source in range(course.num_sources)]
    assert Chairman(course, counts=counts).draw(120 - position) == whole[position:]
    blocks = Chairman(course)
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=5, max_size=20))
    assert [source for size in sizes for source in blocks.draw(size)] == whole[: sum(sizes)][: blocks.position]


@settings(max_examples=40)
@given(courses(zeros=True, max_length=12), st.integers(0, 60), st.integers(0, 60))
def test_draws_taken_back_are_drawn_again(course: Course, num_kept: int, num_undone: int) -> None:
    chairman = Chairman(course)
    whole = chairman.draw(num_kept + num_undone)
    chairman.take_back(whole[num_kept:])
    assert chairman.position == num_kept
    assert chairman.draw(num_undone) == whole[num_kept:]


@settings(max_examples=40)
@given(courses(zeros=False), st.integers(1, 200))
def test_targets_counted_from_an_origin_are_kept_from_there(course: Course, origin: int) -> None:
    assert farthest(course, Chairman(course, origin).draw(200), origin) <= proven_bound(course)


@pytest.mark.parametrize("seed", range(40))
def test_pauses_after_an_origin_are_settled_by_what_is_due_since(seed: int) -> None:
    rng = random.Random(seed)
    course = leaving_course(rng, ramp=bool(seed % 2), return_once=False)
    origin = rng.randint(1, 40)
    assert farthest(course, Chairman(course, origin).draw(150), origin) < 1


@pytest.mark.parametrize(
    ("knots", "ramp", "expected"),
    [
        ([(0, [3, 7])], False, "1011011101101101110110110111011011011101"),
        ([(0, [50, 30, 15, 5])], False, "0102010102010103020101020101020101030201"),
        ([(0, [8, 1, 1]), (30, [0, 1, 1])], True, "0000102001200120120121201212121212121212"),
    ],
)
def test_the_order_is_pinned(knots: list[tuple[int, list[int]]], ramp: bool, expected: str) -> None:
    assert "".join(map(str, Chairman(make_course(knots, ramp=ramp)).draw(40))) == expected
