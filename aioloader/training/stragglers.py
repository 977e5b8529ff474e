"""Who holds the others up: the times of all ranks side by side, and the ranks that are out of line."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NUM_SLOTS", "RankTable", "RankTimer", "RankTimes"]

SLOW_RATIO = 1.5
"""A rank whose work takes so many times the median is a straggler."""

UNEVEN_RATIO = 1.5
"""Tokens are uneven where the rank with most has so many times the mean."""

NUM_SLOTS = 3
"""Numbers that a rank tells the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """What one rank did per step, on average.

    Attributes:
        dp_rank: The rank.
        work_s: Its own time: the wait for data, forward and backward, but not the wait for other ranks.
        data_wait_s: The wait for its loader in that.
        num_tokens: Real tokens.
    """

    dp_rank: int
    work_s: float
    data_wait_s: float
    num_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """The ranks of a run side by side, averaged over `num_steps` steps; one row per data-parallel rank, in their order."""

    num_steps: int
    rows: tuple[RankTimes, ...]

    @property
    def median_work_s(self) -> float:
        """Return the median of the work; of two ranks the faster."""
        return statistics.median_low(row.work_s for row in self.rows)

    @property
    def stragglers(self) -> tuple[RankTimes, ...]:
        """Return the ranks that take more than 1.5 times the median."""
        limit_s = SLOW_RATIO * self.median_work_s
        return tuple(row for row in self.rows if row.work_s > limit_s)

    @property
    def token_imbalance(self) -> float:
        """Return the tokens of the rank with most over the mean of all: 1 where they are even."""
        mean = statistics.fmean(row.num_tokens for row in self.rows)
        return max(row.num_tokens for row in self.rows) / mean if mean else 1.0

    def warnings(self) -> list[str]:
        """Return a sentence for each rank that is out of line, and one if tokens are uneven."""
        median_s = self.median_work_s
        found = [
            f"dp_rank {row.dp_rank} is slow: {row.work_s:.3g} s of work a step, {row.work_s / median_s:.1f} times the median of "
            f"{median_s:.3g} s; {row.data_wait_s:.3g} s of it is waiting for data"
            for row in self.stragglers
        ]
        if self.token_imbalance > UNEVEN_RATIO:
            found.append(
                f"tokens are uneven: the rank with most has {self.token_imbalance:.1f} times the mean; batch by tokens or balance shards"
            )
        return found


class RankTimer:
    """Adds up what this rank does, and packs it for a sum over all ranks: each rank fills its own slots, which gathers them."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._sums = [0.0] * NUM_SLOTS
        self._num_steps = 0

    def add(self, *, work_s: float, data_wait_s: float, num_tokens: int) -> None:
        """Count one step."""
        self._sums = [one + other for one, other in zip(self._sums, (work_s, data_wait_s, num_tokens), strict=True)]
        self._num_steps += 1

    def pack(self) -> list[float]:
        """Return this rank's averages in its slots, zeros in those of the others."""
        before, after = (number * NUM_SLOTS for number in (self._rank, self._size - self._rank - 1))
        return [0.0] * before + [one / self._num_steps for one in self._sums] + [0.0] * after

    def unpack(self, numbers: Sequence[float]) -> RankTable:
        """Return the table that the sum over all ranks makes, and begin anew."""
        rows = [
            RankTimes(dp_rank=rank, work_s=work_s, data_wait_s=wait_s, num_tokens=tokens)
            for rank, (work_s, wait_s, tokens) in enumerate(zip(*(numbers[slot::NUM_SLOTS] for slot in range(NUM_SLOTS)), strict=True))
        ]
        table = RankTable(num_steps=self._num_steps, rows=tuple(rows))
        self._sums, self._num_steps = [0.0] * NUM_SLOTS, 0
        return table
