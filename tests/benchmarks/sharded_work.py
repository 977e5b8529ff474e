"""A workload that is all order: 10^9 numbers in 10^5 shards, in a shuffled order. Its position is known for every number."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aioloader import Shuffle
from aioloader.order.indexed import IndexedOrder
from tests.benchmarks.work import Sample, Stacked

__all__ = ["SHUFFLE", "ShardedNumbers", "Shards"]

SHUFFLE = Shuffle(seed=1)
_NUM_SHARDS = 100_000
_SHARD_SIZE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedNumbers(Stacked):
    """Numbers of `Shards`; `num_records` is how many of them are read."""

    def sample(self, record: int) -> Sample:
        return {"number": np.array(record)}


class Shards:
    """The numbers as an indexed source, made when they are asked for."""

    fetches_many = True

    def __init__(self) -> None:
        self.shard_sizes = np.full(_NUM_SHARDS, _SHARD_SIZE)

    def shard_name(self, shard: int) -> str:
        return f"shard-{shard:05}"

    def start_epoch(self, epoch: int) -> None:
        """Do nothing."""

    def fetch(self, shard: int, rows: Sequence[int]) -> list[int]:
        return [shard * _SHARD_SIZE + row for row in rows]

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "shards", "num_shards": _NUM_SHARDS, "shard_size": _SHARD_SIZE}

    def open(self, epoch: int, cursor: Any) -> Any:
        """Never called: it is read by shard and row."""
        raise NotImplementedError

    def position(self, number: int) -> int:
        """Return where in the shuffled order of the first epoch the number stands."""
        return self._order.position(*divmod(number, _SHARD_SIZE))

    @functools.cached_property
    def _order(self) -> IndexedOrder:
        return IndexedOrder(self.shard_sizes, SHUFFLE, seed=0, epoch=0)
