"""The ordered heap: reordering is a sort, and nothing is released before its turn."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.engine.heap import OrderedHeap


@given(data=st.data(), widths=st.lists(st.integers(1, 5), max_size=30))
def test_reorder_is_a_sort(data: st.DataObject, widths: list[int]) -> None:
    starts = list(itertools.accumulate(widths, initial=0))[:-1]
    entries = list(zip(starts, widths, strict=True))
    heap: OrderedHeap[int] = OrderedHeap()
    released: list[int] = []
    arrived: set[int] = set()
    for start, width in data.draw(st.permutations(entries)):
        heap.push(start, width, start)
        arrived.add(start)
        while (entry := heap.pop()) is not None:
            released.append(entry)
        whole = list(itertools.takewhile(arrived.__contains__, starts))
        assert released == whole  # as much as can be, and no more
        assert len(heap) == len(arrived) - len(whole)
    assert released == starts
    assert heap.pop() is None
    assert len(heap) == 0


def test_nothing_comes_before_its_turn_in_10000_random_schedules() -> None:
    """A058."""
    chance = random.Random(58)
    for _ in range(10_000):
        schedule = list(range(chance.randint(1, 20)))
        chance.shuffle(schedule)
        heap: OrderedHeap[int] = OrderedHeap()
        released: list[int] = []
        for number in schedule:
            heap.push(number, 1, number)
            while (entry := heap.pop()) is not None:
                assert entry == len(released)
                released.append(entry)
        assert len(released) == len(schedule)


def test_entries_are_never_compared() -> None:
    heap: OrderedHeap[object] = OrderedHeap()
    one, other = object(), object()
    heap.push(1, 1, other)
    heap.push(0, 1, one)
    assert heap.pop() is one
    assert heap.pop() is other


def test_what_was_released_is_not_taken_again() -> None:
    heap: OrderedHeap[str] = OrderedHeap()
    heap.push(0, 3, "a")
    assert heap.pop() == "a"
    with pytest.raises(ValueError, match=r"OrderedHeap.push: expected an index of at least 3, got 2; it was released already."):
        heap.push(2, 1, "b")
    heap.push(3, 1, "c")
    assert heap.pop() == "c"
