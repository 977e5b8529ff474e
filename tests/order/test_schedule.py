from __future__ import annotations

import math
from typing import Any

import pytest

from aioloader.errors import ConfigError
from aioloader.order.apportion import NEVER, WEIGHT
from aioloader.order.schedule import Ramp, Steps, course

HALF = {"code": 0.5, "web": 0.5}


def shares(weights: tuple[int, ...]) -> list[float]:
    return [round(weight / WEIGHT, 6) for weight in weights]


def test_steps_hold_and_ramps_are_straight() -> None:
    points = [(0, {"code": 1, "web": 9}), (10, {"code": 3, "web": 2}), (12, {"code": 1, "web": 0})]
    steps, ramp = course(points, ramp=False), course(points, ramp=True)
    assert [shares(steps.weights(p)) for p in (0, 9, 10, 12, 99)] == [[0.1, 0.9], [0.1, 0.9], [0.6, 0.4], [1, 0], [1, 0]]
    assert [shares(ramp.weights(p)) for p in (0, 5, 10, 11, 12, 99)] == [[0.1, 0.9], [0.35, 0.65], [0.6, 0.4], [0.8, 0.2], [1, 0], [1, 0]]


def test_the_others_share_the_weight_of_a_source_left_out() -> None:
    points = [(0, {"a": 5, "b": 3, "c": 2}), (10, {"a": 0, "b": 1, "c": 4})]
    assert shares(course(points, ramp=False, left_out=["a"]).weights(3)) == [0, 0.6, 0.4]
    assert shares(course(points, ramp=True, left_out=["a"]).weights(5)) == [0, 0.4, 0.6]
    assert shares(course(points, ramp=True, left_out=["a", "b"]).weights(5)) == [0, 0, 1]


def test_a_course_ends_where_nobody_is_left_to_share() -> None:
    points = [(0, {"a": 1, "b": 1}), (10, {"a": 1, "b": 0}), (20, {"a": 1, "b": 1})]
    assert course(points, ramp=False).end == NEVER
    assert course(points, ramp=False, left_out=["a"]).end == 10
    assert course(points, ramp=False, left_out=["a"], origin=12).end == 10
    assert course(points, ramp=False, left_out=["a"], origin=20).end == NEVER
    # A ramp to or from a point at which nobody is left keeps the shares of its other end.
    assert course(points, ramp=True, left_out=["a"]).end == NEVER
    assert course(points, ramp=True, left_out=["a", "b"]).end == 0


@pytest.mark.parametrize("kind", [Steps, Ramp])
@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], r"\(points\): expected a list of \(position, weights\), got \[\]; give at least one point"),
        ([(0, HALF), (0, HALF)], r"\(points\): expected a position above 0, got 0; give points in rising order"),
        ([(7, HALF), (3, HALF)], r"expected a position above 7, got 3"),
        ([(-1, HALF)], r"expected \(position >= 0, weights by name\), got \(-1, "),
        ([(1.5, HALF)], r"expected \(position >= 0, weights by name\), got \(1.5, "),
        ([(True, HALF)], r"expected \(position >= 0, weights by name\), got \(True, "),
        ([0, 1], r"expected \(position >= 0, weights by name\), got 0"),
        ([(0, {"code": -0.1, "web": 1})], r" at 0: expected a finite weight >= 0 for 'code', got -0.1"),
        ([(0, {"code": math.nan, "web": 1})], r"for 'code', got nan"),
        ([(0, {"code": 1, "web": math.inf})], r"for 'web', got inf"),
        ([(0, {"code": "0.3", "web": 1})], r"for 'code', got '0.3'"),
        ([(0, {"code": True, "web": 1})], r"for 'code', got True"),
        ([(4, {"code": 0, "web": 0})], r" at 4: expected a positive finite sum of weights, got 0.0; give at least one source a weight"),
        ([(4, {"code": 1e308, "web": 1e308})], r" at 4: expected a positive finite sum of weights, got inf"),
        ([(4, {"code": 1e-13, "web": 1})], r" at 4: expected 0 or at least 2\*\*-40 of the sum for 'code', got 1e-13"),
        (
            [(0, HALF), (5, {"code": 1})],
            r" at 5: expected weights of 'code', 'web', got without 'web'; name each source, with 0 if it pauses",
        ),
        ([(0, HALF), (5, {"code": 1, "web": 0, "x": 1})], r" at 5: expected weights of 'code', 'web', got with unknown 'x'"),
    ],
)
def test_wrong_points_are_refused(kind: type[Steps] | type[Ramp], points: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{kind.__name__}.*{message}"):
        kind(points)


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Ramp\(unit=\): expected 'records' or 'tokens', got 'bytes'"):
        Ramp([(0, HALF)], unit="bytes")  # type: ignore[arg-type]
