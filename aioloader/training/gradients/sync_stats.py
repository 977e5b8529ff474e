"""What synchronization cost: bytes, and how much of the time of communication the backward pass hid."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CommunicationClock", "SyncStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStats:
    """Sums over all rounds so far, of this rank.

    Attributes:
        num_rounds: Rounds of communication: one for each optimizer step.
        num_bytes: Bytes of gradients handed to all-reduce.
        num_late_buckets: Buckets sent a second time, because a backward outside of `no_sync()` came after they had been sent.
        exposed_s: Seconds that `sync_gradients` waited for buckets under way. Waiting for a slower rank counts.
        communication_s: Seconds in which at least one bucket was under way. NaN on an accelerator, where the host does not see it.
        overlap: The part of `communication_s` that the backward pass hid: `1 - exposed_s / communication_s`. NaN if unknown. A low one
            says: smaller buckets, or more work for each step.
    """

    num_rounds: int
    num_bytes: int
    num_late_buckets: int
    exposed_s: float
    communication_s: float

    @property
    def overlap(self) -> float:
        """See the class."""
        return max(0.0, 1 - self.exposed_s / self.communication_s) if self.communication_s > 0 else math.nan


class CommunicationClock:
    """Adds up the seconds in which something is under way. Pure: told what happens and when."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._num_under_way = 0
        self._since_s = 0.0

    def start(self, now_s: float) -> None:
        """Take note that one more is under way."""
        if not self._num_under_way:
            self._since_s = now_s
        self._num_under_way += 1

    def finish(self, now_s: float) -> None:
        """Take note that one has arrived."""
        self._num_under_way -= 1
        if not self._num_under_way:
            self.busy_s += now_s - self._since_s
