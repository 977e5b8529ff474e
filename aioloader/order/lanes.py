"""Lanes: how positions of the global order are dealt to logical streams, and these to ranks. Plain arithmetic.

    position p  ->  lane p % L, seq p // L          lane l  ->  rank l % D

L is fixed for the life of a run, so what a lane delivers does not depend on the number of ranks D (any divisor of L).
"""

from __future__ import annotations

from dataclasses import dataclass

from aioloader.errors import ConfigError
from aioloader.protocols import Share

__all__ = ["LaneMap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneMap:
    """The lanes of one data-parallel rank."""

    num_lanes: int
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        if self.num_lanes < 1 or self.num_lanes % self.dp_size:
            raise ConfigError(
                "Loader(lanes=)",
                expected=f"a positive multiple of dp_size ({self.dp_size})",
                got=self.num_lanes,
                do=f"use dp_size x accumulation, e.g. {self.dp_size} or {2 * self.dp_size}",
            )

    @property
    def served(self) -> range:
        """Return the lanes of this rank, rising: one micro-batch of each makes its share of an optimizer step."""
        return range(self.dp_rank, self.num_lanes, self.dp_size)

    @property
    def share(self) -> Share:
        """Return this rank's positions: those of its lanes."""
        return Share(self.dp_rank, self.dp_size)

    def locate(self, position: int) -> tuple[int, int]:
        """Return (lane, seq) of a position."""
        seq, lane = divmod(position, self.num_lanes)
        return lane, seq

    def num_before(self, lane: int, position: int) -> int:
        """Return how many records of a lane come before a position: all of them, for the number of records."""
        return max(0, position - lane + self.num_lanes - 1) // self.num_lanes

    def position(self, lane: int, seq: int) -> int:
        """Return the position of a record of a lane."""
        return seq * self.num_lanes + lane
