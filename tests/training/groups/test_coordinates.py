"""Data-parallel groups from coordinates: each rank in exactly one, and layouts that do not add up are refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.training.groups.coordinates import data_parallel_ranks


def grid(dp: int, cp: int, tp: int, pp: int) -> list[Mesh]:
    return [
        Mesh(dp_rank=d, dp_size=dp, cp_rank=c, cp_size=cp, tp_rank=t, tp_size=tp, pp_rank=p, pp_size=pp)
        for p in range(pp)
        for d in range(dp)
        for c in range(cp)
        for t in range(tp)
    ]


AXIS = st.integers(1, 3)


@given(dp=AXIS, cp=AXIS, tp=AXIS, pp=AXIS, seed=st.integers(0, 99), across_cp=st.booleans())
def test_groups_are_a_disjoint_cover_in_the_order_of_their_axis(dp: int, cp: int, tp: int, pp: int, seed: int, across_cp: bool) -> None:
    meshes = grid(dp, cp, tp, pp)
    random.Random(seed).shuffle(meshes)
    groups = data_parallel_ranks(meshes, across_cp=across_cp)
    assert sorted(rank for group in groups for rank in group) == list(range(len(meshes)))
    for group in groups:
        places = [(meshes[rank].dp_rank, meshes[rank].cp_rank if across_cp else 0) for rank in group]
        assert places == [(d, c) for d in range(dp) for c in range(cp if across_cp else 1)]
        assert len({(meshes[rank].tp_rank, meshes[rank].pp_rank, None if across_cp else meshes[rank].cp_rank) for rank in group}) == 1


@pytest.mark.parametrize(
    ("meshes", "message"),
    [
        (grid(2, 1, 2, 1)[:3], "got 1 of 2 for cp 0, tp 1, pp 0, ep 0, ranks .1.; start as many processes as the product of the axes"),
        (
            [*grid(2, 1, 2, 1)[:3], grid(2, 1, 2, 1)[2]],
            "got rank 2 and rank 3 both at dp 1/2, tp 0/2; give each rank coordinates of its own",
        ),
        ([*grid(2, 1, 2, 1)[:3], grid(3, 1, 2, 1)[3]], "got dp_size 2 on rank 0 and dp_size 3 on rank 3; give every rank the same dp_size"),
    ],
)
def test_layouts_that_do_not_add_up_are_refused(meshes: list[Mesh], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        data_parallel_ranks(meshes, across_cp=False)
