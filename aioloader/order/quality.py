"""How well a shuffle mixes: measures of an order, each with its value for a uniform random one.

An order is int64[k]: at each place, the number of the record in the unshuffled data that comes there.

    measure               data in order   random   what to conclude
    mean_displacement     0               1        below 0.5: training meets the data in about their own sequence, so a trend in them (of
                                                   date, of length) becomes a trend in time. Mix shards, or more of them.
    adjacent_correlation  1               0        near 1: for a while, all records are of one stretch of the data. With k random shards
                                                   in a window it is about 1/k.
    kept_neighbours       1               0        above 0.01: records that lie side by side (pages of a site, turns of a talk) meet in
                                                   one batch. Mix more records.
    shard_mixing          1 shard/batch   1        below 0.5: as far as shards differ (by language, by date), so do batches, more than
                                                   they need to. Mix more shards, or deal records to shards at random once.

If the data were written in a random order, numbers say nothing about records, and no measure here matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ShuffleQuality", "adjacent_correlation", "kept_neighbours", "mean_displacement", "measure_shuffle", "shard_mixing"]


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """The measures of one order; the module tells what to conclude.

    Attributes:
        mean_displacement: See `mean_displacement`; the others alike.
    """

    mean_displacement: float
    adjacent_correlation: float
    kept_neighbours: float
    shard_mixing: float


def measure_shuffle(
    shards: NDArray[np.int64], order: NDArray[np.int64], batch_size: int, shard_sizes: NDArray[np.int64] | None = None
) -> ShuffleQuality:
    """Return all measures of an order, or of its first records.

    Args:
        shards: int64[k], the shard of the record at each place.
        order: int64[k], its number in the unshuffled data.
        batch_size: Records per batch.
        shard_sizes: int64[num_shards], if `order` is only the beginning of an epoch.
    """
    num_records = order.size if shard_sizes is None else int(shard_sizes.sum())
    return ShuffleQuality(
        mean_displacement=mean_displacement(order, num_records),
        adjacent_correlation=adjacent_correlation(order),
        kept_neighbours=kept_neighbours(order),
        shard_mixing=shard_mixing(shards, batch_size, shard_sizes),
    )


def mean_displacement(order: NDArray[np.int64], num_records: int | None = None) -> float:
    """Return how far records are moved on average, in units of what a uniform random permutation moves them (n / 3).

    Args:
        order: int64[k], the number of the record at each of the places from 0 to k - 1.
        num_records: The records of the epoch, n; None if `order` has all of them. The unit is that of the first k places.

    Returns:
        0 for the order of the data, 1 expected for a random order, up to 1.5 for a reversed one; 1 if there is nothing to move.
    """
    num_records = order.size if num_records is None else num_records
    places = np.arange(order.size, dtype=np.float64)
    before, after = places, num_records - 1 - places
    expected = float((before * (before + 1) + after * (after + 1)).sum()) / (2 * max(num_records, 1))
    return float(np.abs(order - places).sum()) / expected if expected else 1.0


def adjacent_correlation(order: NDArray[np.int64]) -> float:
    """Return the correlation (Pearson's) of the numbers of records that come one after the other.

    Returns:
        1 for the order of the data, 0 expected for a random order but for some 1 / sqrt(k) of chance; 0 below 3 records.
    """
    numbers, followers = order[:-1].astype(np.float64), order[1:].astype(np.float64)
    if order.size < 3:
        return 0.0
    numbers -= numbers.mean()
    followers -= followers.mean()
    return float(numbers @ followers / math.sqrt(float(numbers @ numbers) * float(followers @ followers)))


def kept_neighbours(order: NDArray[np.int64]) -> float:
    """Return the share of successive records that lie side by side in the data, in either direction.

    Returns:
        1 for the order of the data, 2 / k expected for a random order of k records; 0 below 2 records.
    """
    return float((np.abs(np.diff(order)) == 1).mean()) if order.size > 1 else 0.0


def shard_mixing(shards: NDArray[np.int64], batch_size: int, shard_sizes: NDArray[np.int64] | None = None) -> float:
    """Return how many shards the records of a batch come from, in units of what a random order of all records would give.

    Args:
        shards: int64[k], the shard of the record at each place.
        batch_size: Records per batch; a last batch that is not full is left out if there is another.
        shard_sizes: int64[num_shards], records in each; None if `shards` has all of them.

    Returns:
        1 expected for a random order, and whenever there is one shard; the least is one shard per batch.
    """
    batch_size = min(batch_size, shards.size)
    if not batch_size:
        return 1.0
    batches = shards[: shards.size // batch_size * batch_size].reshape(-1, batch_size)
    changes = np.diff(np.sort(batches, axis=1), axis=1) != 0
    sizes = np.unique(shards, return_counts=True)[1] if shard_sizes is None else shard_sizes
    return float(changes.sum(axis=1).mean() + 1) / _expected_shards(sizes, batch_size)


def _expected_shards(shard_sizes: NDArray[np.int64], batch_size: int) -> float:
    """Return from how many shards `batch_size` different records come that are drawn from all at random."""
    num_records = int(shard_sizes.sum())
    sizes, counts = np.unique(shard_sizes, return_counts=True)
    missed = np.ones(sizes.size)
    for drawn in range(batch_size):
        missed *= 1 - sizes / (num_records - drawn)
    return float(counts @ (1 - missed))
