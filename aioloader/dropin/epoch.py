"""The epoch of a dataset, which the copies in a DataLoader's worker processes see too."""

from __future__ import annotations

import mmap
import struct

from aioloader.options import check_int

__all__ = ["SharedEpoch"]

_CELL = struct.Struct("q")


class SharedEpoch:
    """A number in memory that forked processes share: persistent workers keep their copy of the dataset, and would miss what is set later.

    It has neither a name nor a descriptor. A copy that was pickled, for workers that are spawned, goes its own way.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._memory = mmap.mmap(-1, _CELL.size)
        self.set(epoch)

    def __reduce__(self) -> tuple[type[SharedEpoch], tuple[int]]:
        return SharedEpoch, (self.get(),)

    def get(self) -> int:
        """Return the epoch of the next pass."""
        return int(_CELL.unpack_from(self._memory)[0])

    def set(self, epoch: int) -> None:
        """Set it."""
        _CELL.pack_into(self._memory, 0, check_int("set_epoch(epoch)", epoch, at_least=0, do="count epochs from 0"))
