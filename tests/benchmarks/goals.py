"""What aioloader must reach on a workload, and whether it did. Pure: numbers in, verdicts out.

A machine that is slow for a minute is slow for all contestants of a round: they are compared round by round, and the median of what
these give counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks.contestants import CONTESTANTS, DATALOADERS, OURS, REFERENCES

__all__ = [
    "BEST_ORDERED_PEER",
    "BEST_PEER",
    "DATALOADER",
    "SCALED_SERIAL",
    "Goal",
    "Medians",
    "Rounds",
    "Verdict",
    "best_of",
    "judge",
    "median_ratio",
    "medians_of",
    "reference",
]

Rounds = Mapping[str, Mapping[str, Sequence[float]]]
"""Contestant -> number -> its value in each round."""
Medians = Mapping[str, Mapping[str, float]]
"""Contestant -> number -> median over the rounds."""

DATALOADER = "dataloader"
BEST_PEER = "best peer"
BEST_ORDERED_PEER = "best ordered peer"
SCALED_SERIAL = "workers x serial"

_SUBJECT = "aioloader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound on one of aioloader's numbers: by itself, divided by a reference of the same round, or minus one.

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


def judge(goal: Goal, rounds: Rounds, *, workers: int) -> Verdict:
    """Return whether the rounds reach the goal."""
    values = rounds.get(_SUBJECT, {}).get(goal.number)
    against = goal.over if goal.over is not None else goal.minus
    if against is not None:
        others = reference(against, goal.number, rounds, workers=workers, is_rate=goal.at_least is not None)
        values = None if values is None or others is None else _against(values, others, is_ratio=goal.over is not None)
    if values is None:
        return Verdict(goal=goal, value=None, is_reached=None)
    value = statistics.median(values)
    is_reached = value >= goal.at_least if goal.at_least is not None else goal.at_most is not None and value <= goal.at_most
    return Verdict(goal=goal, value=value, is_reached=is_reached)


def median_ratio(values: Sequence[float] | None, others: Sequence[float] | None) -> float | None:
    """Return the median over the rounds of one by the other; None where either is missing, or one by which to divide is 0."""
    ratios = None if values is None or others is None else _against(values, others, is_ratio=True)
    return None if ratios is None else statistics.median(ratios)


def _against(values: Sequence[float], others: Sequence[float], *, is_ratio: bool) -> list[float] | None:
    """Return, round by round, one by the other or one minus the other."""
    if is_ratio and 0 in others:
        return None
    return [one / other if is_ratio else one - other for one, other in zip(values, others, strict=True)]


def medians_of(rounds: Rounds) -> Medians:
    """Return the median of each number."""
    return {contestant: {name: statistics.median(values) for name, values in numbers.items()} for contestant, numbers in rounds.items()}


def reference(name: str, number: str, rounds: Rounds, *, workers: int, is_rate: bool) -> Sequence[float] | None:
    """Return a number of a reference in each round; None where it was not measured. Of several, the best by its median.

    `is_rate`: more is better.
    """
    if name == SCALED_SERIAL:
        alone = rounds.get("serial", {}).get(number)
        return None if alone is None else [workers * one for one in alone]
    best = best_of(name, number, medians_of(rounds), is_rate=is_rate)
    return None if best is None else rounds[best][number]


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
