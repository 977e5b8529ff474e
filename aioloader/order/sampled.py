"""The indices of a map-style dataset as a stream, in the order and with the tail of a `Sampling`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from aioloader.order.sampling import Sampling
from aioloader.protocols import Cursor, Json, Share
from aioloader.sources.by_index import Indices
from aioloader.sources.indexed import IndexedReader

__all__ = ["SampledIndices"]


class SampledIndices:
    """The positions that a sampling deals out, one after another; record ids carry the index that stands at each.

    Args:
        sampling: What is dealt out; position p is that of rank p % dp_size.
        name: The shard part of the record ids.
        with_epoch: See `Indices`.
    """

    def __init__(self, sampling: Sampling, *, name: str = "dataset", with_epoch: bool = False) -> None:
        self._sampling = sampling
        self._indices = Indices(sampling.end(), name=name, with_epoch=with_epoch)

    @property
    def num_records(self) -> int:
        """Return the number of positions of one epoch."""
        return self._sampling.end()

    @property
    def has_repeats(self) -> bool:
        """Return whether a record may stand at several positions of one epoch."""
        return self.num_records > self._sampling.num_records

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the options of the sampling, without the number of ranks where that changes only the tail."""
        names = ("num_records", "seed", "shuffle", "order", "tail", "mode")
        return {"kind": "sampled", "name": self._indices.shard_name(0), **{name: getattr(self._sampling, name) for name in names}}

    def open(self, epoch: int, cursor: Cursor | None) -> IndexedReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`."""
        return self.open_share(epoch, cursor, Share())

    def open_share(self, epoch: int, cursor: Cursor | None, share: Share) -> IndexedReader:
        """Return a reader of one rank's share; see `aioloader.protocols.DealtSource.open_share`."""
        return IndexedReader(self._indices, epoch, cursor, share, _Order(self._sampling, epoch))


class _Order:
    def __init__(self, sampling: Sampling, epoch: int) -> None:
        self._sampling = sampling
        self._indices = sampling.indices(epoch)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `aioloader.sources.indexed.Locate`."""
        return np.zeros_like(positions), self._indices(self._sampling.dealt(positions))
