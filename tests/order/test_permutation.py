"""Keyed permutations: bijective for every size, the same one by one and in arrays, and as mixed as statistics can tell."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aioloader.order.permutation import KeyedPermutation, permutation_key

keys = st.integers(0, 2**64 - 1)
large_sizes = st.integers(1, 63).flatmap(lambda bits: st.integers(2**bits - 2, min(2**bits + 2, 2**63)))


def permuted(n: int, key: int) -> NDArray[np.int64]:
    return KeyedPermutation(n, key)(np.arange(n))


def chi_square_z(counts: NDArray[np.int64]) -> float:
    """Return by how many standard deviations the chi-square of equally likely cells is above its mean."""
    expected = counts.sum() / counts.size
    chi_square = float(((counts - expected) ** 2).sum() / expected)
    return (chi_square - (counts.size - 1)) / math.sqrt(2 * (counts.size - 1))


@given(n=st.integers(0, 3000), key=keys)
@example(n=0, key=0)
@example(n=1, key=0)
@example(n=2, key=0)
@example(n=3, key=0)
def test_every_index_is_hit_once(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permuted(n, key)), np.arange(n))


@pytest.mark.parametrize("n", [2**bits + off for bits in range(2, 18) for off in (-1, 0, 1)])
def test_every_index_is_hit_once_around_powers_of_two(n: int) -> None:
    assert np.array_equal(np.bincount(permuted(n, key=n), minlength=n), np.ones(n))


@given(n=large_sizes, key=keys, data=st.data())
@example(n=2**63, key=2**64 - 1, data=None)
def test_inverse_and_single_values_agree_with_arrays_at_any_size(n: int, key: int, data: st.DataObject | None) -> None:
    ends = [index for index in (0, 1, n - 2, n - 1) if 0 <= index < n]
    some = data.draw(st.lists(st.integers(0, n - 1), max_size=5)) if data and n else []
    indices = np.array(ends + some, np.int64)
    permutation = KeyedPermutation(n, key)
    images = permutation(indices)
    assert images.dtype == np.int64
    assert all(0 <= image < n for image in images.tolist())
    assert [permutation.at(index) for index in indices.tolist()] == images.tolist()
    assert np.array_equal(permutation.inverse(images), indices)
    assert [permutation.inverse_at(image) for image in images.tolist()] == indices.tolist()


def test_shape_is_kept_and_the_argument_is_not_written_to() -> None:
    indices = np.arange(12).reshape(3, 4)
    images = KeyedPermutation(12, 5)(indices)
    assert images.shape == (3, 4)
    assert np.array_equal(indices, np.arange(12).reshape(3, 4))
    assert np.array_equal(KeyedPermutation(12, 5)(indices[:, ::2]), images[:, ::2])
    assert KeyedPermutation(0, 5)(np.empty(0, np.int64)).size == 0


@pytest.mark.parametrize("index", [-1, 10, 2**62, -(2**63)])
def test_indices_outside_are_refused(index: int) -> None:
    permutation = KeyedPermutation(10, 0)
    message = rf"expected indices in \[0, 10\), got {index}$"
    for refuses in (permutation, permutation.inverse):
        with pytest.raises(IndexError, match=message):
            refuses(np.array([3, index]))
    for refuses_one in (permutation.at, permutation.inverse_at):
        with pytest.raises(IndexError, match=message):
            refuses_one(index)


class Counting(KeyedPermutation):
    """Counts the cells that go through all rounds."""

    num_passed = 0

    def _pass(self, cells: NDArray[np.uint64], backward: bool) -> NDArray[np.uint64]:
        self.num_passed += cells.size
        return super()._pass(cells, backward)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 26, 1023, 1025, 65_537, 100_001])
def test_few_indices_are_sent_on(n: int) -> None:
    permutation = Counting(n, 1)
    permutation(np.arange(n))
    assert n <= permutation.num_passed <= n + max(math.isqrt(n), n / 3)


def test_golden_numbers() -> None:
    """A change of these numbers changes the order of every run: raise ORDER_VERSION with them."""
    assert permutation_key(0, 0, "") == 13902243525911021527
    assert permutation_key(7, 3, "window 2") == 6912327701279836550
    assert permutation_key(-1, 10**12, "\u00e4") == 8015097827703519981
    assert permuted(10, 0).tolist() == [3, 1, 2, 5, 7, 6, 8, 0, 9, 4]
    assert KeyedPermutation(10**9, 1)(np.arange(5)).tolist() == [457987059, 83687904, 9217656, 308735092, 274194677]
    assert KeyedPermutation(2**63, 2).at(2**63 - 1) == 8686556733279186314


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_of_a_few_are_equally_frequent(n: int) -> None:
    num_keys = 30 * math.factorial(n)
    seen = Counter(tuple(permuted(n, permutation_key(key, 0, "frequency")).tolist()) for key in range(num_keys))
    counts = np.array([seen[order] for order in itertools.permutations(range(n))])
    assert abs(chi_square_z(counts)) < 3


@pytest.mark.parametrize("n", [12, 100, 1025])
def test_neighbours_of_a_table_are_parted_at_any_distance(n: int) -> None:
    """The most sensitive test known for too few rounds: neighbours in a row or a column of the table."""
    columns = -(-n // (math.isqrt(n - 1) + 1))
    orders = np.array([permuted(n, permutation_key(key, 0, "neighbours")) for key in range(min(300_000 // n, 2000))])
    for lag in (1, columns, 2 * columns):
        distances = (orders[:, lag:] - orders[:, :-lag]) % n
        assert abs(chi_square_z(np.bincount(distances.ravel(), minlength=n)[1:])) < 4


@pytest.mark.parametrize("n", [100, 5000])
def test_displacement_serial_correlation_and_fixed_points_are_as_by_chance(n: int) -> None:
    num_keys = 400
    indices = np.arange(n)
    orders = np.array([permuted(n, permutation_key(key, 1, "chance")) for key in range(num_keys)])
    displacement = np.abs(orders - indices).mean(axis=1) / ((n * n - 1) / (3 * n))
    assert displacement.mean() == pytest.approx(1, abs=4 * math.sqrt(0.4 / n / num_keys))
    assert displacement.std() == pytest.approx(math.sqrt(0.4 / n), rel=0.2)
    centred = orders - (n - 1) / 2
    serial = (centred[:, 1:] * centred[:, :-1]).sum(axis=1) / (centred**2).sum(axis=1)
    assert serial.mean() == pytest.approx(-1 / n, abs=4 / math.sqrt(n * num_keys))
    assert serial.std() == pytest.approx(1 / math.sqrt(n), rel=0.2)
    assert (orders == indices).sum(axis=1).mean() == pytest.approx(1, abs=4 / math.sqrt(num_keys))


def test_consecutive_indices_of_a_huge_range_are_spread_evenly() -> None:
    for n in (10**9, 2**63):
        images = KeyedPermutation(n, 11)(np.arange(n - 100_000, n, dtype=np.int64))
        assert abs(chi_square_z(np.bincount(images // (n // 256 + 1), minlength=256))) < 4
        assert abs(chi_square_z(np.bincount(images % 256, minlength=256))) < 4


def test_each_input_of_the_key_changes_half_of_its_bits() -> None:
    base = [permutation_key(seed, epoch, "records") for seed in range(20) for epoch in range(20)]
    others = {
        "seed": [permutation_key(seed + 1000, epoch, "records") for seed in range(20) for epoch in range(20)],
        "epoch": [permutation_key(seed, epoch + 1000, "records") for seed in range(20) for epoch in range(20)],
        "purpose": [permutation_key(seed, epoch, "record") for seed in range(20) for epoch in range(20)],
    }
    assert len(set(base).union(*others.values())) == 4 * 400
    for changed in others.values():
        flips = np.array([[(a ^ b) >> bit & 1 for bit in range(64)] for a, b in zip(base, changed, strict=True)])
        assert flips.mean() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(flips.size))
        assert abs(flips.mean(axis=0) - 0.5).max() < 4.5 * 0.5 / math.sqrt(400)


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_each_bit_of_the_key_makes_another_permutation(bit: int) -> None:
    n = 1 << 20
    indices = np.arange(2000)
    differences = KeyedPermutation(n, 1234)(indices) ^ KeyedPermutation(n, 1234 ^ 1 << bit)(indices)
    flips = (differences[:, None] >> np.arange(20) & 1).mean(axis=0)
    assert abs(flips - 0.5).max() < 4.5 * 0.5 / math.sqrt(2000)


def test_global_generators_are_not_touched() -> None:
    before = repr(np.random.get_state())
    permuted(1000, 3)
    assert repr(np.random.get_state()) == before
