"""What follows from a worker's death: which records to run again and how, which record is poison, when to give up. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from aioloader.errors import ConfigError
from aioloader.pools.chunk import Block, Chunk, Outcome, Quarantined
from aioloader.protocols import RecordId, Sample

__all__ = ["Blame", "RecoveryOptions", "RestartBudget", "join_blocks", "split_chunk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """When a dead worker is replaced and when it is an error.

    Attributes:
        max_kills: A record that was running at so many deaths is poison.
        max_restarts_per_minute: More deaths than this within a minute end the run.
        timeout_s: A worker that makes no progress for so long is killed; None: never.
    """

    max_kills: int = 3
    max_restarts_per_minute: int = 60
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        if type(self.max_restarts_per_minute) is not int or self.max_restarts_per_minute < 0:
            raise ConfigError(
                "Loader(max_restarts_per_minute=)",
                expected="0 or more",
                got=repr(self.max_restarts_per_minute),
                do="use 0 to make every death an error",
            )


class Blame:
    """Counts at how many deaths each record was running."""

    def __init__(self, max_kills: int) -> None:
        self._max_kills = max_kills
        self._kills: dict[tuple[int, RecordId], int] = {}

    def is_poison(self, epoch: int, record: RecordId) -> bool:
        """Note a death during this record; return whether it was one too many."""
        kills = self._kills[epoch, record] = self._kills.get((epoch, record), 0) + 1
        return kills >= self._max_kills


class RestartBudget:
    """Allows so many restarts within any minute."""

    def __init__(self, max_per_minute: int) -> None:
        self._max_per_minute = max_per_minute
        self._times: deque[float] = deque()
        self.total = 0

    def take(self, now_s: float) -> bool:
        """Return whether another restart is allowed at `now_s`, and count it."""
        while self._times and self._times[0] <= now_s - 60:
            self._times.popleft()
        if len(self._times) >= self._max_per_minute:
            return False
        self._times.append(now_s)
        self.total += 1
        return True


def split_chunk(chunk: Chunk, index: int) -> tuple[Chunk, Chunk, Chunk]:
    """Return the records before the suspect at `index`, the suspect alone, and those after it."""
    before, rest = chunk.split(index)
    return before, *rest.split(1)


def join_blocks(blocks: Sequence[Block]) -> Block:
    """Return the blocks of consecutive chunks as one; only the last may hold a failure."""
    if len(blocks) == 1:
        return blocks[0]
    outcomes = [block.outcome for block in blocks]
    samples: list[Sample] = [sample for outcome in outcomes for sample in outcome.samples]
    counts: list[int] | None = None
    if any(outcome.counts is not None for outcome in outcomes):
        counts = [count for outcome in outcomes for count in (outcome.counts if outcome.counts is not None else [1] * outcome.num_done)]
    quarantined: list[Quarantined] = []
    num_done = 0
    for one in outcomes:
        quarantined.extend(entry._replace(record_index=num_done + entry.record_index) for entry in one.quarantined)
        num_done += one.num_done
    outcome = Outcome(num_done, counts, samples, outcomes[-1].failure, quarantined)
    service_s = sum(block.service_s for block in blocks)
    nbytes, raw_nbytes = sum(block.nbytes for block in blocks), sum(block.raw_nbytes for block in blocks)
    return Block(outcome, blocks[-1].worker, service_s, nbytes, raw_nbytes, tuple(blocks))
