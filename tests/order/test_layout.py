"""Layout: axes, sizes and the way from a global rank to its coordinates and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ConfigError
from aioloader.order.layout import AXES, Layout
from tests.order.layout_cases import layouts


@given(layout=layouts())
def test_ranks_and_coordinates_are_a_bijection(layout: Layout) -> None:
    seen = set()
    for rank in range(layout.world_size):
        places = layout.places(rank)
        assert [(place.axis, place.size) for place in places] == list(layout.sizes)
        assert all(0 <= place.rank < place.size for place in places)
        assert layout.rank_of({place.axis: place.rank for place in places}) == rank
        seen.add(tuple(place.rank for place in places))
    assert len(seen) == layout.world_size == math.prod(size for _, size in layout.sizes)


def test_the_last_axis_changes_fastest() -> None:
    layout = Layout.of({"pp": 2, "dp": 2, "tp": 2})
    assert [tuple(place.rank for place in layout.places(rank)) for rank in (0, 1, 2, 4, 7)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 1),
    ]
    assert layout.describe() == "pp=2, dp=2, tp=2"


@given(layout=layouts(), data=st.data())
def test_one_size_is_inferred_from_the_world(layout: Layout, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from([axis for axis, _ in layout.sizes]))
    assert Layout.of([(one, -1 if one == axis else size) for one, size in layout.sizes], layout.world_size) == layout


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        ({"dp": 4, "tp": 2}, 16, r"the world size, 16, got dp=4, tp=2, which is 8; correct the sizes, or give -1"),
        ({"dp": 8, "ep": 4}, 8, r"the world size, 8, got dp=8, ep=4, which is 32; leave ep out where its ranks are among those of dp"),
        ({"dp": -1, "tp": 3}, 8, r"product divides the world size, 8, got dp=-1, tp=3, of which 3 are given; start a multiple"),
        ({"dp": -1, "tp": -1}, 8, r"at most one size of -1, got -1 for dp and tp; give all sizes but one"),
        ({"dp": -1, "tp": 2}, None, r"where no world size is known, got dp=-1, tp=2; give world_size"),
        ({"pp": 2, "tp": 4}, 8, r"a data-parallel axis: dp, or dp_replicate and dp_shard, got pp, tp; give dp=-1"),
        ({"ep": 8}, 8, r"a data-parallel axis.*got ep"),
        ({}, 1, r"a data-parallel axis.*got no axis"),
        ({"dp": 2, "mp": 4}, 8, r"axes out of pp, dp .* and tp, got 'mp'; rename it"),
        ({"DP": 8}, 8, r"axes out of .*, got 'DP'"),
        ({"dp": 4, "dp_shard": 2}, 8, r"either dp or dp_replicate and dp_shard, got dp and dp_shard; leave dp out"),
        ([("dp", 2), ("tp", 2), ("dp", 2)], 8, r"each axis once, got dp twice"),
        ({"dp": 0}, 1, r"a size of 1 or more for dp, or -1 for what is left, got 0; give the number of dp ranks"),
        ({"dp": -2}, 2, r"for dp, or -1 .*got -2"),
        ({"dp": True}, 1, r"for dp, or -1 .*got True"),
        ({"dp": 2.0}, 2, r"for dp, or -1 .*got 2.0"),
        ({"dp": 2}, 0, r"a world size of 1 or more, got 0"),
    ],
)
def test_what_is_no_layout_is_refused(sizes: Any, world_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^Here: expected .*{message}"):
        Layout.of(sizes, world_size, where="Here")


@pytest.mark.parametrize("rank", [-1, 8, True, "0", 1.0])
def test_a_rank_outside_is_refused(rank: Any) -> None:
    with pytest.raises(ConfigError, match=rf"a rank from 0 to 7 \(dp=4, tp=2\), got {rank!r}; give the global rank"):
        Layout.of({"dp": 4, "tp": 2}).places(rank)


def test_every_axis_is_known() -> None:
    assert Layout.of([(axis, 2) for axis in AXES if axis != "dp"]).world_size == 2**6
