from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.batching import FixedBatch
from aioloader.errors import ConfigError
from aioloader.protocols import Group, Item


def make_items(samples: list[Any]) -> list[Item]:
    return [Item(sample, seq, 0, ("shard", seq)) for seq, sample in enumerate(samples)]


def groups_of(batching: FixedBatch, items: list[Item]) -> list[Group]:
    batcher = batching.start()
    return [group for item in items for group in batcher.push(item)] + list(batcher.finish())


def test_groups_of_three_and_a_rest() -> None:
    items = make_items(list("abcdefgh"))
    groups = groups_of(FixedBatch(3), items)
    assert [list(group.samples) for group in groups] == [["a", "b", "c"], ["d", "e", "f"], ["g", "h"]]
    assert [group.complete for group in groups] == [True, True, False]
    assert [item for group in groups for item in group.items] == items


@settings(max_examples=50, deadline=None)
@given(batch_size=st.integers(1, 9), samples=st.lists(st.none() | st.integers(), max_size=40))
def test_groups_partition_the_samples_in_order(batch_size: int, samples: list[int | None]) -> None:
    groups = groups_of(FixedBatch(batch_size), make_items(samples))
    assert [sample for group in groups for sample in group.samples] == samples
    assert all(len(group.samples) == batch_size for group in groups if group.complete)
    assert len(groups) == -(-len(samples) // batch_size)


def test_samples_are_handed_on_as_they_are() -> None:
    sample = {"pixels": object()}
    (group,) = groups_of(FixedBatch(1), make_items([sample]))
    assert group.samples[0] is sample


@pytest.mark.parametrize("batch_size", [0, -1, True, 2.0, "4", None])
def test_a_wrong_batch_size_is_refused(batch_size: Any) -> None:
    with pytest.raises(ConfigError, match=r"FixedBatch\(batch_size=...\): expected an int >= 1, got .*; give a positive"):
        FixedBatch(batch_size)


def test_options_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError, match="batch_size"):
        FixedBatch(2).batch_size = 3  # type: ignore[misc]
