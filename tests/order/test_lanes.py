"""Lanes: every position belongs to one lane, every lane to one rank, whatever the number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ConfigError
from aioloader.order.lanes import LaneMap

topologies = st.tuples(st.integers(1, 6), st.integers(1, 6))
"""(lanes per rank, ranks)."""


@given(topology=topologies)
def test_the_lanes_of_all_ranks_are_a_disjoint_cover(topology: tuple[int, int]) -> None:
    per_rank, dp_size = topology
    served = [list(LaneMap(num_lanes=per_rank * dp_size, dp_rank=rank, dp_size=dp_size).served) for rank in range(dp_size)]
    assert sorted(lane for lanes in served for lane in lanes) == list(range(per_rank * dp_size))
    assert all(lanes == sorted(lanes) and len(lanes) == per_rank for lanes in served)
    assert all(lane % dp_size == rank for rank, lanes in enumerate(served) for lane in lanes)


@given(num_lanes=st.integers(1, 50), position=st.integers(0, 10**12))
def test_locate_and_position_are_inverse(num_lanes: int, position: int) -> None:
    lanes = LaneMap(num_lanes=num_lanes)
    lane, seq = lanes.locate(position)
    assert 0 <= lane < num_lanes
    assert lanes.position(lane, seq) == position


@given(num_lanes=st.integers(1, 9), num_positions=st.integers(0, 60))
def test_seqs_of_a_lane_are_dense_and_in_order(num_lanes: int, num_positions: int) -> None:
    lanes = LaneMap(num_lanes=num_lanes)
    seqs: dict[int, list[int]] = {}
    for position in range(num_positions):
        lane, seq = lanes.locate(position)
        seqs.setdefault(lane, []).append(seq)
    assert all(dense == list(range(len(dense))) for dense in seqs.values())
    assert not seqs or max(map(len, seqs.values())) - min(len(seqs.get(lane, [])) for lane in range(num_lanes)) <= 1


@given(num_lanes=st.integers(-2, 13), dp_size=st.integers(1, 6))
def test_lanes_are_a_multiple_of_the_ranks(num_lanes: int, dp_size: int) -> None:
    if num_lanes >= 1 and num_lanes % dp_size == 0:
        assert LaneMap(num_lanes=num_lanes, dp_size=dp_size).num_lanes == num_lanes
    else:
        message = rf"Loader\(lanes=\): expected a positive multiple of dp_size \({dp_size}\), got {num_lanes}; use .* {dp_size} or"
        with pytest.raises(ConfigError, match=message):
            LaneMap(num_lanes=num_lanes, dp_size=dp_size)
