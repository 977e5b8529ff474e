"""Placement: every row of every micro-batch is dealt once, in order, and guessing is given up where it never helps."""

from __future__ import annotations

import gc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aioloader.engine.layout import Layout
from aioloader.engine.output import TensorArray
from aioloader.engine.placement import Placement, Reserved
from aioloader.engine.reservations import Reservations, rooms_of
from aioloader.pools.chunk import Chunk, Destination
from aioloader.runtime.segments import Arena

ROW = np.zeros((512, 512), np.float32)


class Ledger:
    """Gives segments with rising numbers; the micro-batches of the first ones are of a shape not known yet."""

    def __init__(self, num_unknown: int) -> None:
        self.num_placed = self.num_missed = 0
        self.num_reserved = 0
        self._num_unknown = num_unknown

    def is_worth_it(self, num_rows: int) -> bool:
        return self._num_unknown == 0

    def reserve(self, num_rows: int) -> Reserved | None:
        if self._num_unknown:
            self._num_unknown -= 1
            return None
        self.num_reserved += 1
        return Reserved(Destination(self.num_reserved, 1 << 20, {"x": ("<f4", (2,), 64)}, num_rows, -1, None), {"x": 8})


def cut(placement: Placement, wanted: int) -> Chunk:
    return placement.place(Chunk(0, list(range(placement.limit(wanted))), []))


@given(batch_size=st.integers(1, 9), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=40), num_unknown=st.integers(0, 3))
def test_rows_are_dealt_in_order_and_no_chunk_reaches_into_another_batch(batch_size: int, sizes: list[int], num_unknown: int) -> None:
    placement = Placement(batch_size, Ledger(num_unknown))
    dealt: dict[int, list[int]] = {}
    position = 0
    for size in sizes:
        chunk = cut(placement, size)
        assert 1 <= len(chunk.records) <= 1.5 * size
        if chunk.destination is not None:
            num_left = -(position + len(chunk.records)) % batch_size
            assert num_left == 0 or 2 * num_left > size, "what is left is worth a chunk"
            row = (chunk.destination.rooms["x"][2] - 64) // 8
            assert row == position % batch_size
            assert row + len(chunk.records) <= batch_size
            assert chunk.destination.num_rows == len(chunk.records)
            dealt.setdefault(chunk.destination.number, []).extend(range(row, row + len(chunk.records)))
        position += len(chunk.records)
    assert all(rows == list(range(len(rows))) for rows in dealt.values())
    assert all(len(rows) == batch_size for number, rows in dealt.items() if number < max(dealt))


def test_a_chunk_with_a_destination_is_the_same_chunk() -> None:
    chunk = Chunk(3, [1, 2], [("shard", 1), ("shard", 2)], raw_nbytes=7, max_bytes=5)
    placement = Placement(2, Ledger(0))
    placement.limit(2)
    placed = placement.place(chunk)
    assert placed.destination is not None
    assert placed._replace(destination=None) == chunk


def test_an_epoch_starts_a_batch() -> None:
    placement = Placement(4, Ledger(0))
    cut(placement, 3)
    placement.begin_epoch()
    chunk = cut(placement, 4)
    assert chunk.destination is not None
    assert (chunk.destination.number, chunk.destination.rooms["x"][2]) == (2, 64)


def test_guessing_is_given_up_where_it_never_helps() -> None:
    ledger = Ledger(0)
    placement = Placement(2, ledger)
    ledger.num_missed = 8
    assert cut(placement, 2).destination is not None
    ledger.num_missed = 9
    chunk = cut(placement, 9)
    assert (chunk.destination, len(chunk.records)) == (None, 9)
    ledger.num_placed = 100
    cut(placement, 1)
    assert cut(placement, 2).destination is not None


# Reservations


def layout_of(rows: int) -> Layout:
    return Layout.of({"image": TensorArray([np.stack([ROW] * rows)], "float32"), "label": TensorArray([np.zeros(rows, np.int64)], "int64")})


def test_only_large_rows_have_room() -> None:
    assert list(rooms_of(layout_of(3), 3)) == ["image"]
    assert rooms_of(layout_of(3), 4) == {}
    assert rooms_of(Layout.of({"x": TensorArray([np.zeros((3, 10))], "float64")}), 3) == {}
    assert rooms_of(layout_of(1), 1) == {}, "a micro-batch so small is copied sooner than made to end a chunk"


def test_a_batch_whose_rows_lie_there_is_found_and_any_other_is_not() -> None:
    arena = Arena(keeps_descriptors=True)
    reservations = Reservations(arena)
    layout = layout_of(3)
    reserved = reservations.reserve(layout.nbytes, 3, rooms_of(layout, 3))
    offset = reserved.destination.rooms["image"][2]
    images = np.frombuffer(reserved.destination.memory, np.float32, 3 * ROW.size, offset).reshape(3, *ROW.shape)
    label = TensorArray([np.zeros(3, np.int64)], "int64")
    for pieces in ([images[1:], images[:1]], [images[:2], images[:1]], [images.copy()], [images[::-1]], [images[:2]]):
        assert reservations.claim(layout, {"image": TensorArray(pieces, "float32"), "label": label}) is None
    claimed = reservations.claim(layout, {"image": TensorArray([images[:1], images[1:]], "float32"), "label": label})
    assert claimed is not None
    assert claimed[0].number == reserved.destination.number
    assert set(claimed[1]) == {"image"}
    assert (reservations.num_open, reservations.nbytes) == (0, 0)
    arena.close()


def test_memory_is_reused_only_when_engine_and_trainer_are_done_with_it() -> None:
    arena = Arena(keeps_descriptors=True)
    reservations = Reservations(arena)
    layout = layout_of(3)

    def reserve() -> Reserved:
        gc.collect()
        return reservations.reserve(layout.nbytes, 3, rooms_of(layout, 3))

    unused = reserve()
    kept = unused.destination.memory[5:9]
    del unused
    claimed = reserve()
    assert claimed.destination.number == 1, "a view of the first one is left"
    images = np.frombuffer(claimed.destination.memory, np.float32, 3 * ROW.size, 0).reshape(3, *ROW.shape)
    fields = {"image": TensorArray([images], "float32"), "label": TensorArray([np.zeros(3, np.int64)], "int64")}
    assert reservations.claim(layout, fields) is not None
    del kept
    assert reserve().destination.number == 0, "never a micro-batch, and out of sight"
    reservations.give_back(1)
    held = reserve()
    assert held.destination.number != 1, "the engine still looks at it"
    del claimed, images, fields
    assert reserve().destination.number == 1
    arena.close()
