"""Why a trainer waits: the engine notes what it was waiting for itself since it handed over the last micro-batch.

source     there was nothing to work on: the upstream is too slow
cpu        the workers had work and no result was there: more of them, or cheaper preprocessing
order      results were there, and the one whose turn it was took longer: a larger buffer
consumer   the micro-batch was there before the trainer asked: the trainer is the bottleneck, as it should be
ranks      it was there, and other ranks had not said yet whether they have one too
"""

from __future__ import annotations

__all__ = ["CAUSES", "CONSUMER", "RANKS", "WaitCauses", "Waits"]

CAUSES = ("source", "cpu", "order", "consumer", "ranks")
CONSUMER = CAUSES.index("consumer")
RANKS = CAUSES.index("ranks")
_CPU = CAUSES.index("cpu")


class WaitCauses:
    """The engine's side: seconds by cause since the last micro-batch."""

    def __init__(self) -> None:
        self._seconds = [0.0] * CONSUMER

    def add(self, seconds: float, *, is_held_up: bool, has_work: bool) -> None:
        """Count time in which the next result in order was missing; it was held up if results were there and workers idle."""
        self._seconds[2 if is_held_up else 1 if has_work else 0] += seconds

    def take(self) -> int:
        """Return the index of the main cause, and begin anew. Time that nobody waited was spent at work: on the CPU."""
        main = max(range(CONSUMER), key=self._seconds.__getitem__)
        cause = main if self._seconds[main] > 0 else _CPU
        self._seconds = [0.0] * CONSUMER
        return cause


class Waits:
    """The trainer's side: how many micro-batches it got, and waited for how long, by cause."""

    def __init__(self) -> None:
        self._batches = [0] * len(CAUSES)
        self._seconds = [0.0] * len(CAUSES)

    def add(self, cause: int, seconds: float) -> None:
        """Count one micro-batch."""
        self._batches[cause] += 1
        self._seconds[cause] += seconds

    @property
    def total_s(self) -> float:
        """Return the seconds waited."""
        return sum(self._seconds)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return the counters as plain data, by cause."""
        return {cause: {"batches": self._batches[index], "wait_s": self._seconds[index]} for index, cause in enumerate(CAUSES)}
