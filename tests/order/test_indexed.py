"""The order of indexed data: a bijection of positions and records, against a reference that keeps lists."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.order.indexed import IndexedOrder
from aioloader.order.permutation import KeyedPermutation, permutation_key
from aioloader.order.shuffle import Shuffle

RecordAt = tuple[int, int]
"""(shard, row)."""

sizes_of_shards = st.lists(st.integers(0, 9), max_size=14)
shuffles = st.one_of(
    st.none(),
    st.builds(Shuffle, shards_in_window=st.one_of(st.none(), st.integers(1, 6)), seed=st.one_of(st.none(), st.integers(-3, 3))),
)


def reference_windows(num_shards: int, shuffle: Shuffle, seed: int, epoch: int) -> list[list[int]]:
    """Return the shards of each window."""
    key = permutation_key(seed, epoch, "records, shards")
    shards = [KeyedPermutation(num_shards, key).at(place) for place in range(num_shards)]
    num_windows = 1 if shuffle.shards_in_window is None else -(-num_shards // shuffle.shards_in_window)
    return [shards[window * num_shards // num_windows : (window + 1) * num_shards // num_windows] for window in range(num_windows)]


def reference_order(sizes: list[int], shuffle: Shuffle | None, seed: int, epoch: int) -> list[RecordAt]:
    """Return all records in order, from lists."""
    if shuffle is None:
        return [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
    seed = seed if shuffle.seed is None else shuffle.seed
    order: list[RecordAt] = []
    for window, shards in enumerate(reference_windows(len(sizes), shuffle, seed, epoch)):
        records = [(shard, row) for shard in shards for row in range(sizes[shard])]
        permutation = KeyedPermutation(len(records), permutation_key(seed, epoch, f"records, window {window}"))
        order += [records[permutation.at(index)] for index in range(len(records))]
    return order


def records_at(order: IndexedOrder, positions: list[int] | range) -> list[RecordAt]:
    shards, rows = order.locate(np.array(positions, np.int64))
    assert shards.dtype == rows.dtype == np.int64
    return list(zip(shards.tolist(), rows.tolist(), strict=True))


def all_records(order: IndexedOrder) -> list[RecordAt]:
    return records_at(order, range(len(order)))


@given(sizes=sizes_of_shards, shuffle=shuffles, seed=st.integers(-9, 9), epoch=st.integers(0, 3))
def test_the_order_is_that_of_the_reference(sizes: list[int], shuffle: Shuffle | None, seed: int, epoch: int) -> None:
    order = IndexedOrder(sizes, shuffle, seed, epoch)
    expected = reference_order(sizes, shuffle, seed, epoch)
    assert len(order) == order.num_records == sum(sizes)
    assert all_records(order) == expected
    assert [order.locate_one(position) for position in range(len(order))] == expected


@given(sizes=sizes_of_shards, shuffle=shuffles, seed=st.integers(-9, 9))
def test_every_record_has_one_position(sizes: list[int], shuffle: Shuffle | None, seed: int) -> None:
    order = IndexedOrder(sizes, shuffle, seed, epoch=0)
    records = [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
    assert sorted(all_records(order)) == records
    assert all(order.locate_one(order.position(shard, row)) == (shard, row) for shard, row in records)


@given(sizes=sizes_of_shards.filter(sum), shuffle=shuffles, data=st.data())
def test_any_positions_are_found_without_those_before_them(sizes: list[int], shuffle: Shuffle | None, data: st.DataObject) -> None:
    order = IndexedOrder(sizes, shuffle, seed=4, epoch=1)
    positions = data.draw(st.lists(st.integers(0, len(order) - 1), max_size=30))
    everything = all_records(order)
    assert records_at(order, positions) == [everything[position] for position in positions]
    start = data.draw(st.integers(0, len(order)))
    assert records_at(order, range(start, len(order))) == everything[start:]


@given(num_shards=st.integers(1, 30), shards_in_window=st.integers(1, 8))
def test_windows_mix_their_own_shards_only_and_are_of_like_size(num_shards: int, shards_in_window: int) -> None:
    shuffle = Shuffle(shards_in_window=shards_in_window)
    records = all_records(IndexedOrder([10] * num_shards, shuffle, seed=0, epoch=0))
    windows = reference_windows(num_shards, shuffle, 0, 0)
    assert {len(window) for window in windows} <= {num_shards // len(windows), -(-num_shards // len(windows))}
    assert max(map(len, windows)) <= shards_in_window
    start = 0
    for window in windows:
        stop = start + 10 * len(window)
        assert sorted(records[start:stop]) == sorted(itertools.product(window, range(10)))
        start = stop


def test_epochs_seeds_and_purposes_differ_and_repeat() -> None:
    sizes = [20] * 10

    def shuffled(seed: int, epoch: int, purpose: str = "records", own_seed: int | None = None) -> list[RecordAt]:
        return all_records(IndexedOrder(sizes, Shuffle(shards_in_window=4, seed=own_seed), seed, epoch, purpose=purpose))

    first = shuffled(1, 0)
    assert shuffled(1, 0) == first
    assert shuffled(2, 0, own_seed=1) == first
    for other in (shuffled(1, 1), shuffled(2, 0), shuffled(1, 0, "web"), shuffled(1, 0, own_seed=2)):
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 10
        assert [shard for shard, _ in first] != [shard for shard, _ in other]


def test_golden_numbers() -> None:
    order = IndexedOrder([3, 0, 2, 4, 1], Shuffle(shards_in_window=2), seed=0, epoch=0)
    assert all_records(order) == [(4, 0), (3, 2), (3, 3), (3, 0), (3, 1), (0, 0), (0, 2), (2, 1), (0, 1), (2, 0)]
    large = IndexedOrder(np.full(100_000, 10_000), Shuffle(), seed=1, epoch=2)
    assert records_at(large, [0, 1, 500_000_000, 999_999_999]) == [(12778, 3421), (6757, 1525), (50368, 5771), (86898, 8418)]


def test_unequal_shards_of_a_large_source_are_a_bijection() -> None:
    sizes = np.random.default_rng(0).integers(0, 400, 1000)
    sizes[::7] = 0
    starts = np.concatenate([[0], np.cumsum(sizes)])
    for shuffle in (None, Shuffle(), Shuffle(shards_in_window=None)):
        order = IndexedOrder(sizes, shuffle, seed=0, epoch=5)
        shards, rows = order.locate(np.arange(len(order)))
        assert (rows < sizes[shards]).all()
        assert np.array_equal(np.sort(starts[shards] + rows), np.arange(len(order)))


def test_positions_and_records_outside_are_refused() -> None:
    for shuffle in (None, Shuffle()):
        order = IndexedOrder([3, 0, 2], shuffle, seed=0, epoch=0)
        for position in (-1, 5):
            message = rf"expected positions in \[0, 5\), got {position}"
            with pytest.raises(IndexError, match=message):
                order.locate(np.array([1, position, 2]))
            with pytest.raises(IndexError, match=message):
                order.locate_one(position)
        with pytest.raises(IndexError, match=r"expected a shard in \[0, 3\), got 3"):
            order.position(3, 0)
        with pytest.raises(IndexError, match=r"expected a row of shard 1 in \[0, 0\), got 0"):
            order.position(1, 0)


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("shuffle", [None, Shuffle(), Shuffle(shards_in_window=None), Shuffle(shards_in_window=1)])
def test_no_records_are_an_order_too(sizes: list[int], shuffle: Shuffle | None) -> None:
    order = IndexedOrder(sizes, shuffle, seed=0, epoch=0)
    assert len(order) == 0
    assert all_records(order) == []
    with pytest.raises(IndexError, match=r"\[0, 0\)"):
        order.locate_one(0)


def test_memory_is_in_proportion_to_shards_however_many_records() -> None:
    num_shards = 100_000
    sizes = np.full(num_shards, 10**10)
    tracemalloc.start()
    try:
        order = IndexedOrder(sizes, Shuffle(), seed=0, epoch=0)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for position in random.Random(0).sample(range(len(order)), 20):
            order.locate_one(position)
            order.locate(np.arange(position, min(position + 512, len(order))))
        searching = tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()
    assert held < 17.5 * num_shards
    assert searching < 500_000


def test_its_text_names_sizes() -> None:
    assert repr(IndexedOrder([2, 3], None, 0, 0)) == "<IndexedOrder of 5 records in 2 shards, not shuffled>"
    assert repr(IndexedOrder([2, 3], Shuffle(shards_in_window=1), 0, 0)) == "<IndexedOrder of 5 records in 2 shards, in 2 windows>"
