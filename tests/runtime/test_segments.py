"""Shared memory: written once, viewed in place, reused only when the last view is gone, and never leaked."""

from __future__ import annotations

import gc
import mmap
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioloader.runtime.segments import Arena, Segment, SegmentViews

GRANULE_BYTES = 1 << 16


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:aioloader" in line for line in file)


def attach(views: SegmentViews, segment: Segment) -> None:
    views.attach(segment.number, os.dup(segment.descriptor), segment.nbytes)


def test_what_is_written_is_seen_without_a_copy() -> None:
    arena, views = Arena(), SegmentViews()
    segment = arena.take(100)
    attach(views, segment)
    view = views.view(segment.number, 100, lambda _: None)
    segment.memory[:5] = b"hello"
    assert view.dtype == np.uint8
    assert view.shape == (100,)
    assert bytes(view[:5]) == b"hello"
    segment.memory[0] = ord("j")
    assert bytes(view[:5]) == b"jello"
    views.close()
    arena.close()


@given(nbytes=st.integers(0, 1 << 24))
def test_a_segment_is_large_enough_and_wastes_little(nbytes: int) -> None:
    arena = Arena()
    segment = arena.take(nbytes)
    assert segment.nbytes % mmap.PAGESIZE == 0
    assert nbytes <= segment.nbytes <= max(GRANULE_BYTES, nbytes + nbytes // 4 + GRANULE_BYTES)
    assert len(segment.memory) == segment.nbytes
    arena.close()


def test_a_returned_segment_is_taken_again_if_it_fits() -> None:
    arena = Arena()
    small, large = arena.take(1), arena.take(10 << 20)
    arena.give_back(large.number)
    assert arena.take(1) is not large  # ten megabytes for one byte would be a waste
    arena.give_back(small.number)
    assert arena.take(GRANULE_BYTES) is small
    assert arena.take(9 << 20) is large
    assert arena.take(9 << 20) is not large
    arena.close()


def test_giving_back_twice_is_a_mistake() -> None:
    arena = Arena()
    number = arena.take(1).number
    arena.give_back(number)
    with pytest.raises(KeyError, match=str(number)):
        arena.give_back(number)
    arena.close()


def test_nothing_is_taken_from_a_closed_arena() -> None:
    """Nobody would close it."""
    before = num_descriptors()
    arena = Arena()
    arena.give_back(arena.take(1).number)
    arena.close()
    with pytest.raises(RuntimeError, match="Arena: expected to be asked for 7 bytes before it is closed, got asked after it"):
        arena.take(7)
    assert num_descriptors() == before


class ArenaMachine(RuleBasedStateMachine):
    """No two takers share a segment; what lies unused stays within the limit; everything is closed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.num_before = num_descriptors()
        self.arena = Arena(max_free_bytes=4 * GRANULE_BYTES)
        self.taken: dict[int, tuple[Segment, bytes]] = {}
        self.retired: list[int] = []

    @rule(nbytes=st.integers(0, 6 * GRANULE_BYTES))
    def take(self, nbytes: int) -> None:
        segment = self.arena.take(nbytes)
        assert segment.number not in self.taken
        assert segment.number not in self.retired
        assert segment.nbytes >= nbytes
        mark = os.urandom(8)
        segment.memory[:8] = mark
        self.taken[segment.number] = segment, mark

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.taken)))
        segment, mark = self.taken.pop(number)
        assert bytes(segment.memory[:8]) == mark
        self.arena.give_back(number)
        retired, self.arena.retired = self.arena.retired, []
        assert not set(retired) & (self.taken.keys() | set(self.retired))
        self.retired += retired

    @invariant()
    def counts_what_is_used(self) -> None:
        assert self.arena.used_bytes == sum(segment.nbytes for segment, _ in self.taken.values())

    def teardown(self) -> None:
        self.arena.close()
        self.arena.close()
        assert self.arena.used_bytes == 0
        assert num_descriptors() == self.num_before


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=30, stateful_step_count=25)


def test_closing_leaves_no_descriptor_even_while_a_writer_still_looks() -> None:
    before = num_descriptors()
    arena = Arena()
    first, second = arena.take(1), arena.take(1)
    writing = np.frombuffer(first.memory, np.uint8, 10)
    arena.close()
    assert num_descriptors() <= before + 1  # what `writing` looks at
    writing[:] = 7
    assert first.number != second.number
    del writing, first, second
    gc.collect()
    assert num_descriptors() == before
    assert num_mappings() == 0


def test_mappings_hold_no_descriptor_and_go_with_their_last_view() -> None:
    arena, views = Arena(), SegmentViews()
    segment = arena.take(5)
    attached = num_descriptors()
    attach(views, segment)
    assert num_descriptors() == attached
    view = views.view(segment.number, 5, lambda _: None)
    segment.memory[:5] = b"hello"
    arena.close()
    views.forget(segment.number)
    views.forget(segment.number)
    views.close()
    assert len(views) == 0
    assert bytes(view) == b"hello"
    assert num_mappings() == 1
    del view
    assert num_mappings() == 0


def test_a_segment_that_cannot_be_mapped_leaves_no_descriptor() -> None:
    views = SegmentViews()
    reading, writing = os.pipe()
    before = num_descriptors()
    with pytest.raises(OSError, match="shared memory: mapping 65536 bytes failed"):
        views.attach(0, reading, GRANULE_BYTES)
    assert num_descriptors() == before - 1
    assert len(views) == 0
    os.close(writing)


def test_an_empty_view_of_a_segment_is_returned_too() -> None:
    arena, views = Arena(), SegmentViews()
    segment = arena.take(0)
    attach(views, segment)
    returned: list[int] = []
    view = views.view(segment.number, 0, returned.append)
    assert view.shape == (0,)
    del view
    assert returned == [segment.number]
    views.close()
    arena.close()


DERIVE: list[Any] = [
    lambda view: view[3:40],
    lambda view: view[::2],
    lambda view: view.view(np.int16),
    lambda view: view.reshape(8, 8),
    lambda view: view.data,
    lambda view: memoryview(view)[5:9],
    lambda view: np.frombuffer(view.data, np.float32, 4, 8),
    lambda view: np.asarray(view).T,
    lambda view: view[10:].view(np.uint8)[1:2],
]


@given(chosen=st.lists(st.sampled_from(DERIVE), max_size=8), seed=st.integers(0, 99))
def test_a_segment_comes_back_once_when_the_last_view_is_gone(chosen: list[Any], seed: int) -> None:
    arena, views = Arena(), SegmentViews()
    segment = arena.take(64)
    attach(views, segment)
    returned: list[int] = []
    view = views.view(segment.number, 64, returned.append)
    held = [view, *(derive(view) for derive in chosen)]
    del view
    random.Random(seed).shuffle(held)
    while held:
        assert returned == []
        held.pop()
    assert returned == [segment.number]
    again = views.view(segment.number, 64, returned.append)
    assert returned == [segment.number]
    del again
    assert returned == [segment.number] * 2
    views.close()
    arena.close()


def test_tensors_over_a_view_keep_it() -> None:
    torch = pytest.importorskip("torch")
    arena, views = Arena(), SegmentViews()
    segment = arena.take(64)
    attach(views, segment)
    returned: list[int] = []
    tensor = torch.from_numpy(views.view(segment.number, 64, returned.append).view(np.float32)).reshape(4, 4)[1]
    segment.memory[16:20] = np.float32(2.5).tobytes()
    assert returned == []
    assert tensor[0] == 2.5
    del tensor
    assert returned == [segment.number]
    views.close()
    arena.close()


class Ledger:
    """A page lock that writes down what is locked."""

    def __init__(self, can_lock: bool) -> None:
        self.locked: dict[int, int] = {}
        self.num_locks = 0
        self._can_lock = can_lock

    def lock(self, address: int, nbytes: int) -> bool:
        self.num_locks += 1
        if self._can_lock:
            self.locked[address] = nbytes
        return self._can_lock

    def unlock(self, address: int) -> None:
        del self.locked[address]


@pytest.mark.parametrize("can_lock", [True, False])
def test_a_mapping_is_page_locked_once_until_it_is_unmapped(can_lock: bool) -> None:
    ledger = Ledger(can_lock)
    arena, views = Arena(), SegmentViews(ledger)
    segment = arena.take(100)
    attach(views, segment)
    for _ in range(3):
        view = views.view(segment.number, 100, lambda _: None)
        address = view.__array_interface__["data"][0]
        assert ledger.locked == ({address: segment.nbytes} if can_lock else {})
    views.close()
    gc.collect()
    assert len(ledger.locked) == can_lock, "a view is left"
    del view
    gc.collect()
    assert ledger.locked == {}
    assert ledger.num_locks == 1
    arena.close()
