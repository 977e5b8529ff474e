"""Balanced global batches: records of known length are dealt to lanes so that all lanes get about as many tokens in each step.

    order      r0 r1 r2 r3 r4 r5 r6 r7 | ...        4 lanes x FixedBatch(2): one global batch
    lengths     9  1  1  8  2  7  3  3
    lanes      (r0 r1) (r3 r2) (r5 r4) (r6 r7)      10, 9, 9 and 6 tokens instead of 11, 8, 4 and 11

Which records make a global batch is not changed, nor is it when a record comes but for its place in that batch. Every rank computes the
same plan from the lengths; nothing is communicated, and a rank still reads its own records only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioloader.batching.balancing import Cost, balance
from aioloader.errors import ConfigError
from aioloader.order.indexed import IndexedOrder
from aioloader.order.ordered import OrderedIndex
from aioloader.order.shuffle import Shuffle
from aioloader.protocols import IndexedSource, Json
from aioloader.sources.indexed import Locate

__all__ = ["Balanced", "BalancedIndex"]

_KEPT_PLANS = 8


class Balanced:
    """Says how long the records of an indexed source are, so that the lanes of each step get equal work. Goes with `FixedBatch`.

    Where preprocessing leaves records out or makes several samples of one, micro-batches shift and balance is lost, but nothing else.

    Args:
        source: What `Loader` takes as an indexed source: a sequence, a map-style dataset, a Hugging Face `Dataset`.
        lengths: int[num_records], tokens of each record in the source's own order, shard after shard.
        cost: What a record of so many tokens costs: "tokens", "quadratic", or a function from int64[n] to n numbers.
    """

    def __init__(self, source: Any, lengths: Sequence[int] | NDArray[Any], *, cost: Cost = "tokens") -> None:
        self.source = source
        self.lengths = np.asarray(lengths)
        self.cost = cost
        if self.lengths.ndim != 1 or self.lengths.dtype.kind not in "iu" or (self.lengths.size and self.lengths.min() < 0):
            got = f"{self.lengths.dtype}{list(self.lengths.shape)}"
            raise ConfigError("Balanced(lengths=)", expected="int[num_records], none negative", got=got, do="give one length per record")

    def __repr__(self) -> str:
        return f"Balanced({self.source!r}, {len(self.lengths)} lengths)"


class BalancedIndex(OrderedIndex):
    """An indexed source in its order, with the records of each global batch dealt out evenly."""

    def __init__(
        self, balanced: Balanced, source: IndexedSource, shuffle: Shuffle | None, seed: int, *, num_lanes: int, batch_size: int
    ) -> None:
        super().__init__(source, shuffle, seed)
        self._balanced = balanced
        self._num_lanes = num_lanes
        self._batch_size = batch_size
        if len(balanced.lengths) != self.num_records:
            raise ConfigError(
                "Balanced(lengths=)",
                expected=f"one length for each of the {self.num_records} records",
                got=f"{len(balanced.lengths)} lengths",
                do="give the lengths of this source",
            )

    def fingerprint(self) -> Mapping[str, Json]:
        """Return that of the source, and what decides how records are dealt out."""
        digest = hashlib.blake2b(np.ascontiguousarray(self._balanced.lengths, dtype=np.int64).tobytes(), digest_size=8).hexdigest()
        cost = self._balanced.cost if isinstance(self._balanced.cost, str) else "callable"
        return {**self.source.fingerprint(), "balanced": {"lengths": digest, "cost": cost, "batch_size": self._batch_size}}

    def order(self, epoch: int) -> Locate:
        """Return which record comes when."""
        order = IndexedOrder(self.source.shard_sizes, self._shuffle, self._seed, epoch, purpose=self._purpose)
        return _BalancedOrder(order, self._balanced, self.source.shard_sizes, self._num_lanes, self._batch_size)


class _BalancedOrder:
    def __init__(self, order: IndexedOrder, balanced: Balanced, sizes: Sequence[int], num_lanes: int, batch_size: int) -> None:
        self._order = order
        self._balanced = balanced
        self._starts = np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])
        self._num_lanes = num_lanes
        self._size = num_lanes * batch_size
        self._plan = lru_cache(_KEPT_PLANS)(self._make_plan)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard and the row at each of `positions`."""
        blocks, places = np.divmod(positions, self._size)
        found = np.empty_like(positions)
        for block in np.unique(blocks).tolist():
            at = blocks == block
            found[at] = self._plan(block)[places[at]]
        return self._order.locate(found)

    def _make_plan(self, block: int) -> NDArray[np.int64]:
        """Return the position, in the order below, of the record at each place of a global batch; the last one stays as it is."""
        first = block * self._size
        positions = np.arange(first, min(first + self._size, self._order.num_records))
        if len(positions) < self._size:
            return positions
        shards, rows = self._order.locate(positions)
        lengths = self._balanced.lengths[self._starts[shards] + rows]
        parts = balance(lengths, self._num_lanes, cost=self._balanced.cost, equal_counts=True)
        return first + np.stack(parts, axis=1).reshape(-1)
