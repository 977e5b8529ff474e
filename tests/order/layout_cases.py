"""Layouts for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from aioloader.order.layout import Layout

DATA = st.sampled_from([["dp"], ["dp_replicate"], ["dp_shard"], ["dp_replicate", "dp_shard"]])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Return a layout of any axes in any order, with up to a few hundred ranks."""
    others = draw(st.lists(st.sampled_from(["pp", "ep", "cp", "tp"]), unique=True))
    axes = draw(st.permutations([*draw(DATA), *others]))
    return Layout.of([(axis, draw(st.integers(1, 4))) for axis in axes])
