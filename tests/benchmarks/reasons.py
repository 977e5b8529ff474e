"""Why a goal is missed, in the figures of the run itself. Pure: medians in, sentences out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tests.benchmarks.figures import figure
from tests.benchmarks.goals import Goal, Medians, best_of

__all__ = ["Reason", "by_process", "handover", "head_start", "no_work", "shared_cores"]

_ALL_OF_THE_CORES = 0.93
"""Of the rate that they have time for: the rest goes to the system and to whatever else runs."""
_CPU = "cpu_us_per_record"
_PROCESSES = {"workers_us_per_record": "the workers", "engine_us_per_record": "the engine", "trainer_us_per_record": "the trainer"}


class Reason(Protocol):
    """Says why aioloader missed a goal; nothing where the figures that it takes were not measured."""

    def __call__(self, goal: Goal, medians: Medians, *, workers: int, cores: int) -> str: ...


def no_work(goal: Goal, medians: Medians, *, workers: int, cores: int) -> str:
    """Return what the rate of the goal leaves for a record on these cores, what is used, and what the one process of the engine allows."""
    ours = medians.get("aioloader", {})
    other = best_of(goal.over, goal.number, medians, is_rate=True) if goal.over is not None else None
    if other is None or goal.at_least is None or _CPU not in ours:
        return ""
    needed = goal.at_least * medians[other][goal.number]
    text = (
        f"{figure(needed)} records/s, {goal.at_least:g} times those of {other}, leave {figure(cores * 1e6 / needed)} us of CPU for each of "
        f"them on {cores} cores, in all processes together; aioloader takes {by_process(ours)}"
    )
    if _CPU in medians.get("serial", {}):
        text += f"; `serial`, which only makes and stacks the samples, {figure(medians['serial'][_CPU])}"
    if medians[other].get("workers_us_per_record") == 0:
        text += f"; {other} passes nothing from one process to another"
    if engine_us := ours.get("engine_us_per_record"):
        most = 1e6 / engine_us
        verdict = "so that more cores alone would not do" if most < needed else "which would do, with more cores"
        text += (
            f". The engine is one process: {figure(engine_us)} us bound it to {figure(most)} records/s on any number of cores, {verdict}"
        )
    return text


def shared_cores(goal: Goal, medians: Medians, *, workers: int, cores: int) -> str:
    """Return how much of what these cores can do, at the CPU time that a record takes, was reached."""
    ours = medians.get("aioloader", {})
    if "rate_per_s" not in ours or not ours.get(_CPU):
        return ""
    most = cores * 1e6 / ours[_CPU]
    share = ours["rate_per_s"] / most
    verdict = (
        f"the cores bound it, which {workers} workers share with the trainer and the engine, and 1 or 2 % are the noise of the machine"
        if share >= _ALL_OF_THE_CORES
        else "this program did not have the cores for itself, or left some idle"
    )
    return (
        f"aioloader takes {by_process(ours)} us of CPU a record, of which {cores} cores have time for {figure(most)} records/s; it reached "
        f"{share:.1%} of that: {verdict}"
    )


def head_start(goal: Goal, medians: Medians, *, workers: int, cores: int) -> str:
    """Return whether a peer is above what the workers can do: it had made more than the first batch when that came, and the time began."""
    other = best_of(goal.over, goal.number, medians, is_rate=True) if goal.over is not None else None
    if other is None or goal.number not in medians.get("serial", {}) or goal.number not in medians.get("aioloader", {}):
        return ""
    most = workers * medians["serial"][goal.number]
    if medians[other][goal.number] <= most:
        return ""
    return (
        f"{workers} workers make {figure(most)} records/s and no more; {other} is above that, since the time counts from the first batch "
        f"on, and by then it has made others; aioloader reaches {medians['aioloader'][goal.number] / most:.1%} of it"
    )


def handover(goal: Goal, medians: Medians, *, workers: int, cores: int) -> str:
    """Return what takes the same time in any loader."""
    floor = medians.get("floor", {})
    if not {"p50_us", "cold_us"} <= floor.keys():
        return ""
    return (
        "`floor`, which only reads a message that is there and makes tensors over memory that is there, takes "
        f"{figure(floor['p50_us'])} us, and {figure(floor['cold_us'])} with the cold caches of a process that has slept"
    )


def by_process(numbers: Mapping[str, float]) -> str:
    """Return the CPU time of a record, and how much of it is whose, as far as that was measured."""
    parts = [f"{figure(numbers[name])} {whose}" for name, whose in _PROCESSES.items() if name in numbers]
    return figure(numbers[_CPU]) + (f" ({', '.join(parts)})" if parts else "")
