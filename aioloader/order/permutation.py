"""Keyed permutations: an order of n records that is computed where it is needed and never stored.

    index -> (row, column) -> row += F(column), column += F(row), ... -> index'          again while index' >= n

The n indices are the cells of a table of about sqrt(n) x sqrt(n). A round adds to one coordinate, modulo its size, a keyed hash of the
other. That can be undone, so rounds of any number are a permutation of the cells. The table has at most sqrt(n) cells more than there
are indices; an index that is sent to one of those is sent on, which makes it a permutation of the n indices.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ORDER_VERSION", "KeyedPermutation", "permutation_key"]

ORDER_VERSION: Final = 1
"""Part of every key and fingerprint: a change of the order on purpose raises it, so that old states are refused, not misread."""

_MAX_SIZE: Final = 1 << 63
_MASK: Final = (1 << 64) - 1
_SMALL: Final = 1024
_NUM_ROUNDS: Final = 6
_NUM_ROUNDS_IF_SMALL: Final = 16
"""Six rounds of random functions are as good as a random permutation while few of many indices are looked at (Patarin: Security of
random Feistel schemes with 5 or more rounds, 2004). All indices of a small table can be: measured on all pairs of neighbours, 6 rounds
show below some hundred indices and 10 rounds below twenty.
"""


def _constant(number: int) -> NDArray[np.uint64]:
    """Return uint64[]: NumPy takes arrays without dimensions twice as fast as scalars."""
    return np.array(number, np.uint64)


_FACTOR_1: Final = _constant(0x9E3779B97F4A7C15)
_FACTOR_2: Final = _constant(0xBF58476D1CE4E5B9)
"""Odd numbers without a pattern in their bits: 2^64 / golden ratio, and the first factor of SplitMix64's finaliser."""
_HALF: Final = _constant(32)


def permutation_key(seed: int, epoch: int, purpose: str) -> int:
    """Return a key in [0, 2^64): another seed, epoch or purpose changes each of its bits with probability one half.

    The same on every machine and Python. `purpose` keeps apart the permutations of one epoch, e.g. `"window 3"`.
    """
    text = f"aioloader order {ORDER_VERSION}, seed {seed}, epoch {epoch}, {purpose}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class KeyedPermutation:
    """A permutation of [0, n), 0 <= n <= 2^63, that a key selects: a table of about 2 KB, whatever n is.

    Pure: the result depends on n and the key alone. One object may be shared by threads. Well mixed, but no cipher: it stands up to
    statistics, not to an adversary. An index is sent on again n^-0.5 times on average, and 1/3 time at most (n = 3).

    Args:
        n: The number of indices, at most 2^63.
        key: Any integer, of which the lowest 64 bits count; see `permutation_key`.

    Source: Black, Rogaway: Ciphers with arbitrary finite domains, 2002 (generalised Feistel network, cycle walking).
    """

    __slots__ = ("_columns", "_rounds", "_size", "key", "n")

    def __init__(self, n: int, key: int) -> None:
        assert 0 <= n <= _MAX_SIZE, f"n = {n}"
        self.n = n
        self.key = key & _MASK
        rows = math.isqrt(n - 1) + 1 if n else 1
        columns = max(-(-n // rows), 1)
        num_rounds = _NUM_ROUNDS if n >= _SMALL else _NUM_ROUNDS_IF_SMALL
        self._rounds = _rounds(self.key, (rows, columns), num_rounds)
        self._size, self._columns = _constant(n), _constant(columns)

    def __repr__(self) -> str:
        return f"<KeyedPermutation of {self.n}, key {self.key:#018x}>"

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return int64, of the shape of `indices`: where the permutation sends each of them.

        Raises:
            IndexError: An index is not in [0, n).
        """
        return self._walk(indices, backward=False)

    def inverse(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return int64, of the shape of `indices`: which index the permutation sends to each of them.

        Raises:
            IndexError: An index is not in [0, n).
        """
        return self._walk(indices, backward=True)

    def at(self, index: int) -> int:
        """Return where one index is sent; cheaper than an array of one.

        Raises:
            IndexError: The index is not in [0, n).
        """
        return self._walk_one(index, backward=False)

    def inverse_at(self, index: int) -> int:
        """Return which index is sent to this one.

        Raises:
            IndexError: The index is not in [0, n).
        """
        return self._walk_one(index, backward=True)

    def _walk(self, indices: NDArray[np.int64], *, backward: bool) -> NDArray[np.int64]:
        cells = np.asarray(indices, np.int64).ravel().view(np.uint64)  # negative ones become large and are found below
        if cells.size and (largest := int(cells.max())) >= self.n:
            raise self._not_an_index(largest - (largest >> 63 << 64))
        cells = self._pass(cells, backward)
        outside = np.flatnonzero(cells >= self._size)
        while outside.size:
            moved = self._pass(cells[outside], backward)
            cells[outside] = moved
            outside = outside[moved >= self._size]
        return cells.view(np.int64).reshape(np.shape(indices))

    def _pass(self, cells: NDArray[np.uint64], backward: bool) -> NDArray[np.uint64]:
        """Return the cells after all rounds; a new array."""
        row = cells // self._columns
        column = cells - row * self._columns
        coordinates = (row, column)
        scratch = np.empty((2, cells.size), np.uint64)
        for step in reversed(self._rounds) if backward else self._rounds:
            step.shift(coordinates[step.changed], coordinates[1 - step.changed], backward, scratch)
        row *= self._columns
        row += column
        return row

    def _walk_one(self, index: int, *, backward: bool) -> int:
        if not 0 <= index < self.n:
            raise self._not_an_index(index)
        columns = int(self._columns)
        while True:
            coordinates = list(divmod(index, columns))
            for step in reversed(self._rounds) if backward else self._rounds:
                coordinates[step.changed] = step.shift_one(coordinates[step.changed], coordinates[1 - step.changed], backward)
            index = coordinates[0] * columns + coordinates[1]
            if index < self.n:
                return index

    def _not_an_index(self, index: int) -> IndexError:
        return IndexError(f"KeyedPermutation: expected indices in [0, {self.n}), got {index}")


class _Round(NamedTuple):
    """Adds to one coordinate, modulo its size, a hash of the other one.

    The hash takes 64 bits, of which the highest are scaled to [0, size): as many as the product with the size leaves room for. The
    fewest are 32, for n near 2^63.
    """

    changed: int
    key: NDArray[np.uint64]
    size: NDArray[np.uint64]
    bits: NDArray[np.uint64]
    kept_bits: NDArray[np.uint64]

    def shift(self, coordinate: NDArray[np.uint64], other: NDArray[np.uint64], backward: bool, scratch: NDArray[np.uint64]) -> None:
        """Change `coordinate` in place; `scratch` is uint64[2, n]. Overflow is wanted: all arithmetic is modulo 2^64."""
        mixed, spare = scratch
        np.bitwise_xor(other, self.key, out=mixed)
        np.multiply(mixed, _FACTOR_1, out=mixed)
        np.right_shift(mixed, _HALF, out=spare)
        np.bitwise_xor(mixed, spare, out=mixed)
        np.multiply(mixed, _FACTOR_2, out=mixed)
        np.right_shift(mixed, self.bits, out=mixed)
        np.multiply(mixed, self.size, out=mixed)
        np.right_shift(mixed, self.kept_bits, out=mixed)
        # Modulo by a minimum: what is below 0, or less than 0 without the size, has wrapped round to a huge number.
        if backward:
            np.subtract(coordinate, mixed, out=coordinate)
            np.add(coordinate, self.size, out=spare)
        else:
            np.add(coordinate, mixed, out=coordinate)
            np.subtract(coordinate, self.size, out=spare)
        np.minimum(coordinate, spare, out=coordinate)

    def shift_one(self, coordinate: int, other: int, backward: bool) -> int:
        """Return what `shift` makes of one coordinate."""
        size, bits = int(self.size), int(self.bits)
        mixed = (other ^ int(self.key)) * int(_FACTOR_1) & _MASK
        mixed = (mixed ^ mixed >> 32) * int(_FACTOR_2) & _MASK
        amount = (mixed >> bits) * size >> 64 - bits
        return (coordinate + (-amount if backward else amount)) % size


def _rounds(key: int, sizes: tuple[int, int], num_rounds: int) -> tuple[_Round, ...]:
    key_bytes = hashlib.shake_128(key.to_bytes(8, "little")).digest(8 * num_rounds)
    keys = np.frombuffer(key_bytes, "<u8").astype(np.uint64)
    sides = [tuple(map(_constant, (size, size.bit_length(), 64 - size.bit_length()))) for size in sizes]
    return tuple(_Round(i % 2, keys[i, ...], *sides[i % 2]) for i in range(num_rounds))
