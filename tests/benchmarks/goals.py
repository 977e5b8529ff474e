"""What aioloader must reach on a workload, and whether it did. Pure: medians in, verdicts out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.benchmarks.contestants import CONTESTANTS, DATALOADERS, OURS, REFERENCES

__all__ = ["BEST_ORDERED_PEER", "BEST_PEER", "DATALOADER", "SCALED_SERIAL", "Goal", "Medians", "Verdict", "best_of", "judge", "reference"]

Medians = Mapping[str, Mapping[str, float]]
"""Contestant -> number -> median over the rounds."""

DATALOADER = "dataloader"
BEST_PEER = "best peer"
BEST_ORDERED_PEER = "best ordered peer"
SCALED_SERIAL = "workers x serial"

_SUBJECT = "aioloader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound on one of aioloader's numbers: by itself, divided by a reference, or minus a reference.

    A reference is a contestant, or one of `DATALOADER` (the better of its variants), `BEST_PEER`, `BEST_ORDERED_PEER` and
    `SCALED_SERIAL` (what the workers would reach if each did as much as a single process alone).
    """

    number: str
    over: str | None = None
    minus: str | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def text(self) -> str:
        """Return the goal in words."""
        what = f"aioloader {self.number}"
        if self.over is not None:
            what = f"{what} / {self.over}"
        if self.minus is not None:
            what = f"{what} - {self.minus}"
        bound = f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"
        return f"{what} {bound}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a goal; `value` and `is_reached` are None where the goal could not be judged."""

    goal: Goal
    value: float | None
    is_reached: bool | None


def judge(goal: Goal, medians: Medians, *, workers: int) -> Verdict:
    """Return whether the medians reach the goal."""
    value = medians.get(_SUBJECT, {}).get(goal.number)
    against = goal.over if goal.over is not None else goal.minus
    if against is not None:
        found = reference(against, goal.number, medians, workers=workers, is_rate=goal.at_least is not None)
        if value is None or found is None or (goal.over is not None and found == 0):
            return Verdict(goal=goal, value=None, is_reached=None)
        value = value / found if goal.over is not None else value - found
    if value is None:
        return Verdict(goal=goal, value=None, is_reached=None)
    is_reached = value >= goal.at_least if goal.at_least is not None else goal.at_most is not None and value <= goal.at_most
    return Verdict(goal=goal, value=value, is_reached=is_reached)


def reference(name: str, number: str, medians: Medians, *, workers: int, is_rate: bool) -> float | None:
    """Return the number of a reference, the best of several; None where none of them was measured. `is_rate`: more is better."""
    if name == SCALED_SERIAL:
        alone = medians.get("serial", {}).get(number)
        return None if alone is None else workers * alone
    best = best_of(name, number, medians, is_rate=is_rate)
    return None if best is None else medians[best][number]


def best_of(name: str, number: str, medians: Medians, *, is_rate: bool) -> str | None:
    """Return the contestant that is the reference; None where none of them was measured."""
    found = {contestant: numbers[number] for contestant, numbers in medians.items() if number in numbers and _belongs(contestant, name)}
    if not found:
        return None
    return max(found, key=found.__getitem__) if is_rate else min(found, key=found.__getitem__)


def _belongs(contestant: str, group: str) -> bool:
    if group == DATALOADER:
        return contestant in DATALOADERS
    if group in (BEST_PEER, BEST_ORDERED_PEER):
        is_peer = contestant not in (*OURS, *REFERENCES)
        return is_peer and (group == BEST_PEER or CONTESTANTS[contestant].is_ordered)
    return contestant == group
