"""Measures of a shuffle are 0 or the least for data in order, 1 or 0 for a random order, and tell windows of different sizes apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aioloader.order.indexed import IndexedOrder
from aioloader.order.quality import (
    ShuffleQuality,
    adjacent_correlation,
    kept_neighbours,
    mean_displacement,
    measure_shuffle,
    shard_mixing,
)
from aioloader.order.shuffle import Shuffle
from aioloader.order.window import WindowOrder

NUM_SHARDS, SHARD_SIZE = 200, 100
NUM_RECORDS = NUM_SHARDS * SHARD_SIZE


def quality(shuffle: Shuffle | None, batch_size: int = 50) -> ShuffleQuality:
    order = IndexedOrder([SHARD_SIZE] * NUM_SHARDS, shuffle, seed=0, epoch=0)
    shards, rows = order.locate(np.arange(len(order)))
    return measure_shuffle(shards, shards * SHARD_SIZE + rows, batch_size)


def windowed(window: int) -> NDArray[np.int64]:
    order = WindowOrder(Shuffle(window=window), seed=0, epoch=0)
    return np.concatenate([start + order.permutation(start // window, window) for start in range(0, NUM_RECORDS, window)])


def test_data_in_order() -> None:
    measured = quality(None)
    assert measured.mean_displacement == 0
    assert measured.adjacent_correlation == pytest.approx(1)
    assert measured.kept_neighbours == 1
    assert measured.shard_mixing == pytest.approx(1 / 44.3, rel=0.01)  # one shard, of 200 x (1 - 0.995^50) expected


def test_a_permutation_of_everything() -> None:
    measured = quality(Shuffle(shards_in_window=None))
    assert measured.mean_displacement == pytest.approx(1, abs=0.02)
    assert measured.adjacent_correlation == pytest.approx(0, abs=0.03)
    assert measured.kept_neighbours < 5 / NUM_RECORDS
    assert measured.shard_mixing == pytest.approx(1, abs=0.01)


def test_windows_of_random_shards_correlate_by_one_over_their_number() -> None:
    measured = {shards: quality(Shuffle(shards_in_window=shards)) for shards in (1, 4, 20)}
    for shards, one in measured.items():
        assert one.mean_displacement == pytest.approx(1, abs=0.1)
        assert one.adjacent_correlation == pytest.approx(1 / shards, abs=0.1)
        num_kept = 2 / (shards * SHARD_SIZE) * NUM_RECORDS
        assert one.kept_neighbours * NUM_RECORDS == pytest.approx(num_kept, abs=4 * num_kept**0.5)
    assert measured[1].shard_mixing < measured[4].shard_mixing < measured[20].shard_mixing < 0.5


def test_windows_of_a_stream_move_records_by_a_third_of_a_window() -> None:
    for window in (10, 1000, 5000):
        order = windowed(window)
        assert mean_displacement(order) == pytest.approx(window / NUM_RECORDS, rel=0.05)
        assert adjacent_correlation(order) > 0.9
        assert kept_neighbours(order) == pytest.approx(2 / window, rel=0.5)


def test_known_values() -> None:
    assert mean_displacement(np.array([1, 0])) == 2  # 1 each, where half of the random orders move nothing
    assert mean_displacement(np.arange(1000)[::-1]) == pytest.approx(1.5, rel=0.01)
    assert adjacent_correlation(np.arange(9)[::-1]) == pytest.approx(1)
    assert adjacent_correlation(np.array([0, 9, 1, 8, 2, 7])) < -0.9
    assert kept_neighbours(np.array([3, 4, 0, 2, 1])) == 0.5


def test_the_beginning_of_an_epoch_is_measured_by_its_own_unit() -> None:
    order = np.random.default_rng(0).permutation(NUM_RECORDS)
    shards = order // SHARD_SIZE
    begun = measure_shuffle(shards[:2000], order[:2000], 50, np.full(NUM_SHARDS, SHARD_SIZE))
    assert begun.mean_displacement == pytest.approx(1, abs=0.05)
    assert begun.shard_mixing == pytest.approx(1, abs=0.02)
    one_window = np.random.default_rng(0).permutation(np.repeat(np.arange(4), SHARD_SIZE))
    assert shard_mixing(one_window, 50) == pytest.approx(1, abs=0.01)
    assert shard_mixing(one_window, 50, np.full(NUM_SHARDS, SHARD_SIZE)) == pytest.approx(4 / 44.3, rel=0.01)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) >= 3),
    batch_size=st.integers(1, 8),
    seed=st.integers(0, 9),
)
def test_shard_mixing_is_relative_to_the_mean_over_random_orders(sizes: list[int], batch_size: int, seed: int) -> None:
    shards = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    batch_size = min(batch_size, shards.size)
    batches = [shards[start : start + batch_size] for start in range(0, shards.size - batch_size + 1, batch_size)]
    distinct = np.mean([len(set(batch.tolist())) for batch in batches])
    draws = np.random.default_rng(0).permuted(np.tile(shards, (1500, 1)), axis=1)[:, :batch_size]
    expected = np.mean([len(set(draw)) for draw in draws.tolist()])
    assert shard_mixing(shards, batch_size) == pytest.approx(distinct / expected, rel=0.08)


def test_a_last_batch_that_is_not_full_is_left_out() -> None:
    sizes = np.array([4, 4])
    assert shard_mixing(np.array([0, 1, 0, 1, 0]), 2, sizes) == shard_mixing(np.array([0, 1, 0, 1]), 2, sizes)
    assert shard_mixing(np.array([0, 0, 1]), 100) == pytest.approx(1)


@pytest.mark.parametrize("num_records", [0, 1])
def test_nothing_to_move_is_mixed_well(num_records: int) -> None:
    order = np.arange(num_records)
    assert measure_shuffle(order, order, 8) == ShuffleQuality(1.0, 0.0, 0.0, 1.0)
