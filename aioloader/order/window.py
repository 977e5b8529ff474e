"""The order of a stream: records as they come, permuted inside windows of a fixed number of records.

    read       r0 r1 r2 r3 | r4 r5 r6 r7 | r8 r9              window = 4
    hand out   r2 r0 r3 r1 | r5 r4 r7 r6 | r9 r8

A window is read as a whole before its first record is handed out, so the number of records of the last one is known by then. The state
of such a stream is two things: the cursor of the source at the start of the window, and the offset, how many records of the window were
handed out. Resume reads the window again from that cursor, and goes on at that offset; it never reads more than one window twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aioloader.order.permutation import KeyedPermutation, permutation_key
from aioloader.order.shuffle import Shuffle

__all__ = ["WindowOrder"]


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """The order of one epoch of a stream. Pure: depends on the attributes alone.

    Attributes:
        shuffle: The options; `shuffle.window` records are mixed at a time.
        seed: The loader's; used if the shuffle has none of its own.
        epoch: The number of the pass.
        purpose: Keeps apart streams that have the same seed, e.g. those of several lanes.
    """

    shuffle: Shuffle
    seed: int
    epoch: int
    purpose: str = "stream"

    def locate(self, position: int) -> tuple[int, int]:
        """Return (window, offset): the record at `position` is number `permutation(window, ...)[offset]` of those in the window."""
        return divmod(position, self.shuffle.window)

    def permutation(self, window: int, num_records: int) -> NDArray[np.int64]:
        """Return int64[num_records]: which of the records of a window, counted as they were read, is handed out at each offset.

        Args:
            window: The number of the window in the epoch.
            num_records: The records that it holds: `shuffle.window`, or fewer in the last one.
        """
        assert 0 <= num_records <= self.shuffle.window, f"num_records = {num_records}"
        key = permutation_key(self.shuffle.seed_or(self.seed), self.epoch, f"{self.purpose}, window {window}")
        return KeyedPermutation(num_records, key)(np.arange(num_records))
