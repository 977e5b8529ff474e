"""Runs the contestants of a workload by turns, compares what they delivered, and takes medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tests.benchmarks.contestants import CONTESTANTS
from tests.benchmarks.launching import LaunchError, launch
from tests.benchmarks.task import Measurement, Settings, Task
from tests.benchmarks.workloads import Workload

__all__ = ["Result", "Row", "Summary", "differences", "run_workload", "summarize"]

_UNCHECKED = ("nothing",)
"""Contestants that do not deliver the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One number: its value in each round, with their median and extremes."""

    values: tuple[float, ...]
    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one contestant reached."""

    contestant: str
    rounds: int
    numbers: dict[str, Summary]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one workload.

    Attributes:
        left_out: Contestant -> why it has no row.
        disagreements: What was delivered by some and not by others, in words; empty if all did the same work.
    """

    workload: Workload
    num_records: int
    rows: list[Row]
    left_out: dict[str, str]
    disagreements: list[str] = field(default_factory=list)


def run_workload(
    workload: Workload,
    contestants: Sequence[str],
    settings: Settings,
    *,
    num_records: int,
    rounds: int,
    timeout_s: float,
    note: Callable[[str], None],
) -> Result:
    """Run a checked round, which warms up caches too, then `rounds` timed ones; each starts with another contestant.

    With `rounds=0` the checked round is all there is, and its numbers are the result: good enough for a smoke run only.
    """
    left_out = {name: f"{', '.join(lacking)} is not installed" for name in contestants if (lacking := CONTESTANTS[name].missing())}
    measured: dict[str, list[Measurement]] = {name: [] for name in contestants if name not in left_out}
    disagreements: list[str] = []
    for number in range(rounds + 1):
        counts = number > 0 or rounds == 0
        taking_part = [name for name in measured if name not in left_out]
        first = number % len(taking_part) if taking_part else 0
        this_round: dict[str, Measurement] = {}
        for name in taking_part[first:] + taking_part[:first]:
            note(f"{workload.name}: {'check' if number == 0 else f'round {number} of {rounds}'}: {name}")
            task = Task(
                workload=workload.name,
                contestant=name,
                num_records=num_records,
                is_check=number == 0,
                launched_at_s=time.monotonic(),
                settings=settings,
            )
            try:
                this_round[name] = launch(task, timeout_s=timeout_s, watches_memory=workload.watches_memory and counts)
            except LaunchError as error:
                left_out[name] = str(error)
        disagreements += [text for text in differences(this_round, num_records) if text not in disagreements]
        if counts:
            for name, measurement in this_round.items():
                measured[name].append(measurement)
    rows = [summarize(name, found) for name, found in measured.items() if found and name not in left_out]
    return Result(workload=workload, num_records=num_records, rows=rows, left_out=left_out, disagreements=disagreements)


def differences(measured: dict[str, Measurement], num_records: int) -> list[str]:
    """Return, in words, what contestants delivered that they should not have; the first ordered one is the measure of the others."""
    delivered = {name: measurement for name, measurement in measured.items() if name not in _UNCHECKED}
    found = [
        f"{name} delivered {one.num_records} of {num_records} records" for name, one in delivered.items() if one.num_records != num_records
    ]
    ordered = [name for name in delivered if CONTESTANTS[name].is_ordered]
    if not ordered:
        return found
    model = "serial" if "serial" in ordered else ordered[0]
    for name, one in delivered.items():
        if one.content != delivered[model].content:
            found.append(f"{name} delivered other content than {model}")
        elif name in ordered and one.order != delivered[model].order:
            found.append(f"{name} delivered another order than {model}")
    return found


def summarize(contestant: str, measured: Iterable[Measurement]) -> Row:
    """Return the median and the extremes of each number."""
    values: dict[str, list[float]] = {}
    rounds = 0
    for measurement in measured:
        rounds += 1
        for name, value in measurement.numbers.items():
            values.setdefault(name, []).append(value)
    numbers = {
        name: Summary(values=tuple(found), median=statistics.median(found), lowest=min(found), highest=max(found))
        for name, found in values.items()
    }
    return Row(contestant=contestant, rounds=rounds, numbers=numbers)
