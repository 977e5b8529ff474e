"""The order of a source that knows how many records each shard has: position -> (shard, row), by arithmetic.

    shards in random order          [ s7  s2  s9 ][ s0  s4  s1 ] ...          windows of consecutive shards, sizes as equal as can be
    cells, counted through          0 . . . . . 99 100 . . . 187 ...          window w has the cells from one border to the next
    position                        permuted inside its window -> cell -> (shard, row)

Only the running sums of the shard sizes are kept, so any position is found in the time of a binary search over shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from aioloader.order.permutation import KeyedPermutation, permutation_key
from aioloader.order.shuffle import Shuffle

__all__ = ["IndexedOrder"]


class IndexedOrder:
    """The order of one epoch. Pure: depends on the arguments alone; may be shared by threads.

    Every (shard, row) has one position. Without a shuffle, the records come as they lie in the shards. With one, shards are permuted, and
    records only change places inside their window of at most `shards_in_window` shards. Window sizes differ by one shard at most, so
    that no epoch ends with a window of a few shards. Permutations are keyed by seed, epoch and number of the window.

    Holds 16 bytes per shard (8 without a shuffle), nothing per record.

    Args:
        shard_sizes: int[num_shards], records in each shard; a shard may be empty.
        shuffle: The options, or None to keep the order of the data.
        seed: The loader's; used if the shuffle has none of its own.
        epoch: The number of the pass.
        purpose: Keeps apart sources that have the same seed: with equal ones, sources of equal shard sizes have equal orders.
    """

    __slots__ = ("_borders", "_key", "_permutation", "_shards", "_starts")

    def __init__(
        self, shard_sizes: Sequence[int] | NDArray[np.int64], shuffle: Shuffle | None, seed: int, epoch: int, *, purpose: str = "records"
    ) -> None:
        sizes = np.asarray(shard_sizes, np.int64)
        self._permutation: KeyedPermutation | None = None
        self._key = (seed, epoch, purpose)
        first_places = np.array([0, sizes.size])
        if shuffle is not None:
            self._key = (shuffle.seed_or(seed), epoch, purpose)
            self._permutation = KeyedPermutation(sizes.size, permutation_key(self._key[0], epoch, f"{purpose}, shards"))
            self._shards = self._permutation(np.arange(sizes.size))
            sizes = sizes[self._shards]
            first_places = _split_evenly(sizes.size, shuffle.shards_in_window or sizes.size)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        """int64[num_shards + 1]: first cell of the shard at each place, and the number of cells."""
        self._borders = self._starts[first_places]
        """int64[num_windows + 1]: first cell of each window, and the number of cells."""

    def __len__(self) -> int:
        return self.num_records

    def __repr__(self) -> str:
        shuffled = f"in {self._borders.size - 1} windows" if self._permutation else "not shuffled"
        return f"<IndexedOrder of {self.num_records} records in {self._starts.size - 1} shards, {shuffled}>"

    @property
    def num_records(self) -> int:
        """Return the number of positions."""
        return int(self._starts[-1])

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard and the row at each of `positions`: two int64[n]. Fast where these fall in few windows.

        Raises:
            IndexError: A position is not in [0, num_records).
        """
        positions = np.asarray(positions, np.int64)
        if positions.size:
            self._check(int(positions.min()))
            self._check(int(positions.max()))
        cells = positions if self._permutation is None else self._cells(positions)
        places = self._starts.searchsorted(cells, "right") - 1
        shards = places if self._permutation is None else self._shards[places]
        return shards, cells - self._starts[places]

    def locate_one(self, position: int) -> tuple[int, int]:
        """Return the shard and the row at one position; cheaper than an array of one.

        Raises:
            IndexError: The position is not in [0, num_records).
        """
        self._check(position)
        cell = position
        if self._permutation is not None:
            first, permutation = self._window(_last_start(self._borders, position))
            cell = first + permutation.at(position - first)
        place = _last_start(self._starts, cell)
        shard = place if self._permutation is None else int(self._shards[place])
        return shard, cell - int(self._starts[place])

    def position(self, shard: int, row: int) -> int:
        """Return the position of a record: the inverse of `locate_one`.

        Raises:
            IndexError: There is no such shard, or no such row in it.
        """
        num_shards = self._starts.size - 1
        if not 0 <= shard < num_shards:
            raise IndexError(f"IndexedOrder: expected a shard in [0, {num_shards}), got {shard}")
        place = shard if self._permutation is None else self._permutation.inverse_at(shard)
        start, stop = self._starts[place : place + 2].tolist()
        if not 0 <= row < stop - start:
            raise IndexError(f"IndexedOrder: expected a row of shard {shard} in [0, {stop - start}), got {row}")
        cell: int = start + row
        if self._permutation is None:
            return cell
        first, permutation = self._window(_last_start(self._borders, cell))
        return first + permutation.inverse_at(cell - first)

    def _cells(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        cells = np.empty_like(positions)
        for window, members in _group(self._borders.searchsorted(positions, "right") - 1):
            first, permutation = self._window(window)
            cells[members] = first + permutation(positions[members] - first)
        return cells

    def _window(self, window: int) -> tuple[int, KeyedPermutation]:
        """Return the first cell of a window, and the permutation of its cells, counted from there."""
        first, stop = self._borders[window : window + 2].tolist()
        return first, _permutation(stop - first, self._key, window)

    def _check(self, position: int) -> None:
        if not 0 <= position < self.num_records:
            raise IndexError(f"IndexedOrder: expected positions in [0, {self.num_records}), got {position}")


@lru_cache(maxsize=64)
def _permutation(num_cells: int, key: tuple[int, int, str], window: int) -> KeyedPermutation:
    """Return the permutation of a window. Kept, as the next block of positions is most often in the same one."""
    seed, epoch, purpose = key
    return KeyedPermutation(num_cells, permutation_key(seed, epoch, f"{purpose}, window {window}"))


def _split_evenly(count: int, largest: int) -> NDArray[np.int64]:
    """Return int64[num_parts + 1]: the borders of the fewest parts of at most `largest`, with sizes that differ by one at most."""
    num_parts = max(-(-count // max(largest, 1)), 1)
    return np.arange(num_parts + 1) * count // num_parts


def _group(labels: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64] | slice]]:
    """Yield each label with the places where it is, rising."""
    if not labels.size:
        return
    if labels[0] == labels[-1] and labels.min() == labels.max():
        yield int(labels[0]), slice(None)
        return
    by_label = labels.argsort(kind="stable")
    borders = np.flatnonzero(np.diff(labels[by_label])) + 1
    for members in np.split(by_label, borders):
        yield int(labels[members[0]]), members


def _last_start(starts: NDArray[np.int64], cell: int) -> int:
    """Return the last part that starts at or before `cell`: the only one of its start that is not empty."""
    return int(starts.searchsorted(cell, "right")) - 1
