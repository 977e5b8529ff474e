"""Random courses for the tests of mixtures, and how far counts are from exact targets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

from hypothesis import strategies as st

from aioloader.order.apportion import RECORD, WEIGHT, Course, Piece, apportion

WEIGHTS = (1, 2, 3, 5, 10, 50, 997)
Knots = Sequence[tuple[int, Sequence[int]]]


def make_course(knots: Knots, *, ramp: bool) -> Course:
    shares = [apportion(weights, WEIGHT) for _, weights in knots]
    ends = [*shares[1:], shares[-1]] if ramp else shares
    return Course([Piece(start, first, last) for (start, _), first, last in zip(knots, shares, ends, strict=True)])


@st.composite
def courses(draw: st.DrawFn, *, zeros: bool, max_length: int = 40, heaviest: int = 1000) -> Course:
    num_sources = draw(st.integers(1, 8))
    weight = st.one_of(st.just(0), st.integers(0, heaviest)) if zeros else st.integers(1, heaviest)
    weights = st.lists(weight, min_size=num_sources, max_size=num_sources).filter(any)
    lengths = draw(st.lists(st.integers(1, max_length), max_size=8))
    knots = [(sum(lengths[:index]), draw(weights)) for index in range(len(lengths) + 1)]
    return make_course(knots, ramp=draw(st.booleans()))


def leaving_course(rng: random.Random, *, ramp: bool, return_once: bool) -> Course:
    """Return a course on which the first source stays and each other one leaves for good (or comes once and leaves)."""
    num_sources, num_knots, longest = rng.randint(2, 8), rng.randint(2, 7), rng.choice((1, 3, 12, 60))
    spans = [(0, num_knots)]
    for _ in range(num_sources - 1):
        first, last = sorted((rng.randrange(num_knots), rng.randrange(num_knots)))
        spans.append((first if return_once else 0, last + 1))
    knots, position = [], 0
    for knot in range(num_knots):
        knots.append((position, [rng.choice(WEIGHTS) if first <= knot < last else 0 for first, last in spans]))
        position += rng.randint(1, longest)
    return make_course(knots, ramp=ramp)


def exact_weights(course: Course, source: int, position: int) -> Fraction:
    return (course.target(source, position + 1) - course.target(source, position)) / RECORD


def farthest(course: Course, sources: Sequence[int], origin: int = 0) -> Fraction:
    """Return the largest distance of any count from its target at any prefix of the draws from an origin on, in records."""
    before = [course.target(source, origin) for source in range(course.num_sources)]
    counts = [0] * course.num_sources
    worst = Fraction(0)
    for position, source in enumerate(sources, start=origin + 1):
        counts[source] += 1
        due = [(course.target(other, position) - before[other]) / RECORD for other in range(course.num_sources)]
        worst = max(worst, *(abs(count - share) for count, share in zip(counts, due, strict=True)))
    return worst
