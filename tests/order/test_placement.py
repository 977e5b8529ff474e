"""Placement: who serves which lanes, and who gets the same micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ConfigError
from aioloader.order.layout import Layout
from aioloader.order.placement import Placement
from tests.order.layout_cases import layouts


def placement(lanes: int | None = None, accumulation: int | None = None, **sizes: int) -> Placement:
    return Placement.of(Layout.of(sizes), lanes=lanes, accumulation=accumulation)


def test_lanes_and_peers() -> None:
    placed = placement(pp=2, dp=4, tp=2, lanes=8)
    assert placed.groups() == ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15))
    assert [list(placed.lanes(dp_rank)) for dp_rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert (placed.dp_size, placed.num_lanes, placed.accumulation) == (4, 8, 2)
    assert placed.resumable_dp_sizes == (1, 2, 4, 8)


@given(layout=layouts(), accumulation=st.integers(1, 4))
def test_peers_partition_the_world_and_lanes_are_a_disjoint_cover(layout: Layout, accumulation: int) -> None:
    placed = Placement.of(layout, accumulation=accumulation)
    groups = placed.groups()
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert sorted(lane for dp_rank in range(placed.dp_size) for lane in placed.lanes(dp_rank)) == list(range(placed.num_lanes))
    for dp_rank, group in enumerate(groups):
        meshes = [placed.mesh(rank) for rank in group]
        assert {mesh.dp_rank for mesh in meshes} == {dp_rank}
        assert sorted(mesh.peer_rank for mesh in meshes) == list(range(meshes[0].num_peers))
        assert meshes[0].peer_rank == 0  # so that the reader can be told without asking the others
        assert len(placed.lanes(dp_rank)) == placed.accumulation == accumulation


def test_one_lane_for_each_data_parallel_rank_by_default() -> None:
    assert placement(dp=3, tp=2).num_lanes == 3


def test_expert_parallel_peers_are_no_peers() -> None:
    assert placement(dp=2, ep=2, tp=2).groups() == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize("lanes", [0, 6, -4])
def test_lanes_that_do_not_fit_are_refused(lanes: int) -> None:
    with pytest.raises(ConfigError, match=rf"a positive multiple of dp_size \(4\), got {lanes}; use dp_size x accumulation, e.g. 4 or 8"):
        placement(dp=4, lanes=lanes)


def test_lanes_and_accumulation_are_one_choice() -> None:
    with pytest.raises(ConfigError, match="lanes or accumulation, got 8 lanes and an accumulation of 2; leave one out"):
        placement(dp=4, lanes=8, accumulation=2)
