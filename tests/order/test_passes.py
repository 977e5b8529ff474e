from __future__ import annotations

from typing import Any

import pytest

from aioloader.order.mixture import Mixture
from aioloader.order.passes import Passes
from aioloader.order.schedule import Steps

THREE: dict[str, tuple[Any, float]] = {"a": (None, 5), "b": (None, 3), "c": (None, 2)}


def endings(mixture: Mixture, ends: list[tuple[int, int]]) -> list[str]:
    """Return the answers for sources that end at places."""
    passes = Passes(mixture, {})
    return [passes.end(source, mixture.course(passes.left_out, place), place) for source, place in ends]


@pytest.mark.parametrize(
    ("options", "sources", "expected"),
    [
        ({"stop": "first_exhausted"}, [1], ["stop"]),
        ({"stop": "all_exhausted"}, [1, 1, 0, 1, 2], ["repeat", "repeat", "repeat", "repeat", "stop"]),
        ({"stop": "repeat"}, [0, 1, 2, 0, 1, 2], ["repeat"] * 6),
        ({"stop": "first_exhausted", "repeats": {"b": 2}}, [1, 1, 0], ["repeat", "leave out", "stop"]),
        ({"stop": "all_exhausted", "repeats": {"a": 1}}, [0, 1, 1, 2], ["leave out", "repeat", "repeat", "stop"]),
        ({"stop": "repeat", "repeats": {"a": 1, "b": 2, "c": 1}}, [0, 1, 2, 1], ["leave out", "repeat", "leave out", "stop"]),
    ],
)
def test_endings(options: dict[str, Any], sources: list[int], expected: list[str]) -> None:
    assert endings(Mixture(THREE, **options), [(source, 10 + place) for place, source in enumerate(sources)]) == expected


def test_a_source_that_has_no_weight_any_more_is_not_waited_for() -> None:
    schedule = Steps([(100, {"a": 1, "b": 1, "c": 0})])
    mixture = Mixture(THREE, schedule=schedule, stop="all_exhausted")
    assert endings(mixture, [(0, 50), (1, 60), (0, 99)]) == ["repeat", "repeat", "repeat"]
    assert endings(mixture, [(0, 50), (1, 120)]) == ["repeat", "stop"]


def test_a_source_that_gets_its_weight_later_is_waited_for() -> None:
    schedule = Steps([(0, {"a": 1, "b": 1, "c": 0}), (100, {"a": 1, "b": 1, "c": 1})])
    mixture = Mixture(THREE, schedule=schedule, stop="all_exhausted")
    assert endings(mixture, [(0, 10), (1, 20), (2, 130)]) == ["repeat", "repeat", "stop"]


def test_the_epoch_ends_where_the_others_have_no_weight() -> None:
    schedule = Steps([(100, {"a": 1, "b": 0, "c": 0})])
    mixture = Mixture(THREE, schedule=schedule, stop="repeat", repeats={"a": 1})
    assert endings(mixture, [(0, 99)]) == ["leave out"]
    assert endings(mixture, [(0, 100)]) == ["stop"]


def test_counts_are_saved_by_name() -> None:
    passes = Passes(Mixture(THREE, repeats={"c": 2, "a": 3}), {"c": 2, "a": 1})
    assert (passes.counts, passes.left_out) == ([1, 0, 2], ("c",))
