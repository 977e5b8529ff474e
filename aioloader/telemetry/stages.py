"""What each stage of the engine did and how long it waited.

stage       service_s                                     wait_s
source      reading                                       for room: what is in flight is at its limit
preprocess  in the workers                                of chunks: on their way, and behind others
order       none: it only compares numbers                for the result whose turn it is
batch       forming and collating micro-batches           none of its own: it waits where `order` does
bridge      writing to shared memory and sending           for the trainer to take what is ready

How to read them: a stage whose `occupancy` is near the number of its workers (preprocess) or 1 (the others) is the bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Stage", "Stages"]


@dataclass(slots=True)
class Stage:
    """Counters of one stage: records or samples that passed, seconds at work, seconds waiting."""

    count: int = 0
    service_s: float = 0.0
    wait_s: float = 0.0

    def add(self, count: int, service_s: float, wait_s: float = 0.0) -> None:
        """Count work that was done."""
        self.count += count
        self.service_s += service_s
        if wait_s > 0.0:
            self.wait_s += wait_s

    def add_wait(self, wait_s: float) -> None:
        """Count time in which the stage had nothing to do."""
        self.wait_s += wait_s

    def snapshot(self, elapsed_s: float) -> dict[str, float]:
        """Return the counters as plain data, with the rate and the mean number at work over `elapsed_s`."""
        over_s = max(elapsed_s, 1e-9)
        return {
            "count": self.count,
            "service_s": self.service_s,
            "wait_s": self.wait_s,
            "rate_per_s": self.count / over_s,
            "occupancy": self.service_s / over_s,
        }


@dataclass(slots=True)
class Stages:
    """The stages of one engine, in the order of the data flow. Counts: records, records, results, samples, micro-batches."""

    source: Stage = field(default_factory=Stage)
    preprocess: Stage = field(default_factory=Stage)
    order: Stage = field(default_factory=Stage)
    batch: Stage = field(default_factory=Stage)
    bridge: Stage = field(default_factory=Stage)

    def snapshot(self, elapsed_s: float) -> dict[str, dict[str, float]]:
        """Return the counters of all stages as plain data, over the time since the first pass began."""
        return {name: getattr(self, name).snapshot(elapsed_s) for name in ("source", "preprocess", "order", "batch", "bridge")}
