"""The watchdog: names the stage that makes no progress, and where its workers stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Facts", "Watchdog", "describe_stall"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What is to be seen of a running pass at one moment.

    Attributes:
        progress: Anything that changes when a stage gets on.
        is_consumer_bound: The trainer has batches waiting: whatever stands still, it is not the engine's fault.
        is_reading: The source was opened, or asked for records, and has not answered.
        num_running: Chunks in the pool.
        is_collating: A collator is running.
        blocked_in: The stage whose code keeps the engine's event loop from running, None while that runs. Nobody hears of what the
            trainer has taken meanwhile.
    """

    progress: tuple[int, ...]
    is_consumer_bound: bool
    is_reading: bool
    num_running: int
    is_collating: bool
    blocked_in: str | None = None

    @property
    def stage(self) -> str:
        """Return the stage that the others wait for."""
        if self.blocked_in is not None:
            return self.blocked_in
        if self.is_collating:
            return "collate"
        if self.num_running:
            return "preprocess"
        return "source" if self.is_reading else "order"


class Watchdog:
    """Decides when standing still is a stall. Pure: told the time."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._progress: tuple[int, ...] = ()
        self._since_s = now_s

    def look(self, facts: Facts, now_s: float) -> float | None:
        """Return for how many seconds nothing has moved, if that is too long; once per stall and timeout."""
        if facts.progress != self._progress or (facts.is_consumer_bound and facts.blocked_in is None):
            self._progress, self._since_s = facts.progress, now_s
            return None
        stalled_s = now_s - self._since_s
        if stalled_s < self._timeout_s:
            return None
        self._since_s = now_s
        return stalled_s


def describe_stall(facts: Facts, stalled_s: float, stacks: Mapping[str, str]) -> str:
    """Return the report: which stage, since when, and what each worker is doing."""
    effect = "the trainer waits" if facts.blocked_in is None else "blocks the engine's event loop"
    lines = [
        f"no progress for {stalled_s:.1f} s: stage {facts.stage} does not get on and {effect} ({facts.num_running} chunks run)",
    ]
    for name, stack in stacks.items():
        lines += [f"  {name}:", *(f"    {line}" for line in stack.rstrip().splitlines())]
    return "\n".join(lines)
