from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.order.apportion import NEVER, RECORD, WEIGHT, Course, Pause, Piece, apportion
from tests.order.mixture_cases import courses, make_course


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=20).filter(any), st.integers(0, 2**50))
def test_shares_sum_to_the_total_and_are_less_than_one_away_from_exact(weights: list[int], total: int) -> None:
    shares = apportion(weights, total)
    assert sum(shares) == total
    for weight, share in zip(weights, shares, strict=True):
        assert abs(share - Fraction(weight * total, sum(weights))) < 1
        assert weight or not share


def test_the_largest_remainders_are_rounded_up_and_the_earlier_wins_a_tie() -> None:
    assert apportion([1, 1, 1], 100) == (34, 33, 33)
    assert apportion([3, 0, 1, 3], 10) == (4, 0, 2, 4)  # 4.29, 0, 1.43, 4.29
    assert apportion([Fraction(1, 3), Fraction(2, 3)], WEIGHT) == apportion([1, 2], WEIGHT) == (366503875925, 733007751851)


def weights_by_definition(knots: list[tuple[int, list[int]]], *, ramp: bool, position: int) -> list[Fraction]:
    shares = [[Fraction(share, WEIGHT) for share in apportion(weights, WEIGHT)] for _, weights in knots]
    index = max(index for index, (start, _) in enumerate(knots) if start <= position)
    if not ramp or index + 1 == len(knots):
        return shares[index]
    done = Fraction(position - knots[index][0], knots[index + 1][0] - knots[index][0])
    return [low + (high - low) * done for low, high in zip(shares[index], shares[index + 1], strict=True)]


@pytest.mark.parametrize("ramp", [False, True])
def test_targets_are_the_exact_sums_of_the_weights(ramp: bool) -> None:
    knots = [(0, [3, 0, 1]), (7, [1, 1, 1]), (8, [0, 5, 2]), (30, [4, 0, 0])]
    course = make_course(knots, ramp=ramp)
    sums = [Fraction(0)] * 3
    for position in range(45):
        assert [course.target(source, position) / RECORD for source in range(3)] == sums
        weights = weights_by_definition(knots, ramp=ramp, position=position)
        assert all(abs(whole - weight * WEIGHT) < 1 for whole, weight in zip(course.weights(position), weights, strict=True))
        assert sum(course.weights(position)) == WEIGHT
        sums = [total + weight for total, weight in zip(sums, weights, strict=True)]


@settings(max_examples=60)
@given(courses(zeros=True, max_length=15), st.integers(0, 7), st.integers(1, 60 * RECORD))
def test_reach_is_the_first_position_before_which_the_amount_is_due(course: Course, source: int, amount: int) -> None:
    source %= course.num_sources
    position = course.reach(source, amount)
    if position == NEVER:
        assert course.target(source, NEVER - 1) < amount
    else:
        assert course.target(source, position) >= amount > course.target(source, position - 1)
    low, high, start, slope = course.line(source, amount)
    if low < amount <= high:
        assert start - (low - amount) // slope == position


@pytest.mark.parametrize("length", [1, 2, 999_983, 10**12])
def test_reach_is_exact_on_long_ramps(length: int) -> None:
    course = make_course([(0, [0, 1]), (length, [1, 0])], ramp=True)
    for source in (0, 1):
        for part in (1, 2, 5, 10**6):
            amount = max(int(course.target(source, length)) // part, 1)
            position = course.reach(source, amount)
            assert course.target(source, position) >= amount > course.target(source, position - 1)


def test_pauses_are_whole_stretches_of_zero_weight() -> None:
    steps = make_course([(0, [1, 0]), (5, [0, 1]), (7, [0, 3]), (9, [1, 1]), (12, [0, 1])], ramp=False)
    assert steps.pauses(0) == [Pause(5, 9), Pause(12, NEVER)]
    assert steps.pauses(1) == [Pause(0, 5)]
    assert [steps.is_over(0, position) for position in (6, 11, 12, 100)] == [False, False, True, True]
    assert not steps.is_over(1, 100)
    ramp = make_course([(0, [1, 1]), (4, [0, 1]), (8, [1, 1]), (9, [0, 1])], ramp=True)
    assert ramp.pauses(0) == [Pause(4, 5), Pause(9, NEVER)]


def test_a_course_can_end() -> None:
    course = Course([Piece(0, (WEIGHT, 0), (WEIGHT, 0)), Piece(3, (0, 0), (0, 0))], end=3)
    assert (course.end, course.reach(0, 3 * RECORD), course.reach(0, 3 * RECORD + 1)) == (3, 3, NEVER)
