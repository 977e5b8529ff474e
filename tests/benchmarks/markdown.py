"""The benchmark section of README.md, made of the JSON that a run has written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tests.benchmarks.contestants import CONTESTANTS, DATALOADERS, OURS, REFERENCES
from tests.benchmarks.figures import figure
from tests.benchmarks.goals import BEST_PEER, Medians
from tests.benchmarks.workloads import NOT_MEASURED, WORKLOADS, Workload

__all__ = ["as_markdown"]

_VERDICTS = {True: "reached", False: "**missed**", None: "not judged"}


def as_markdown(found: Mapping[str, Any]) -> str:
    """Return what the run was, a table of all workloads with their goals, notes to it, and a table of all contestants."""
    measured = {workload["name"]: workload for workload in found["workloads"]}
    medians = {name: _medians(workload) for name, workload in measured.items()}
    return "\n\n".join(
        part
        for part in (
            _head(found),
            _table(["workload", "number", "aioloader", "best `DataLoader`", BEST_PEER, "reference", "goals"], _rows(measured, medians)),
            "\n".join(_notes(measured, medians, found["rounds"])),
            "All contestants:",
            _table(["contestant", *(f"`{name}`: {WORKLOADS[name].headline}" for name in medians)], _contestants(medians)),
        )
        if part
    )


def _head(found: Mapping[str, Any]) -> str:
    machine, versions = found["machine"], found["versions"]
    duration = f", {found['duration_s'] / 60:.0f} minutes" if "duration_s" in found else ""
    return (
        f"Medians of {found['rounds'] or 'no'} rounds{' (QUICK: NUMBERS NOT TO BELIEVE)' if found['is_quick'] else ''} with "
        f"{found['workers']} workers on {machine['cores']} cores of {machine['processor']} ({found['date'][:10]}{duration}; "
        f"`{found['command']}`), "
        f"with {', '.join(f'{name} {version}' for name, version in versions.items())}. In brackets: the second number of the row. Goals "
        "that name another contestant compare within each round; the median of these ratios, or differences, counts."
    )


def _rows(measured: Mapping[str, Any], medians: Mapping[str, Medians]) -> Iterable[list[str]]:
    for name, workload in WORKLOADS.items():
        numbers = workload.headline if workload.beside is None else f"{workload.headline} ({workload.beside})"
        row = [f"`{name}`: {workload.title}", numbers]
        if name not in measured:
            yield [*row, "not in this run", "-", "-", "-", "-"]
            continue
        goals = [_goal(goal) for goal in measured[name]["goals"]]
        shown = medians[name]
        yield [
            *row,
            _cell(workload, shown.get("aioloader")),
            _best(workload, shown, lambda one: one in DATALOADERS),
            _best(workload, shown, lambda one: one not in (*OURS, *REFERENCES)),
            "<br>".join(f"{_cell(workload, shown[one])} {one}" for one in REFERENCES if one in shown) or "-",
            "<br>".join(goals),
        ]
    for what, why in NOT_MEASURED.items():
        yield [f"{what}: not measured, {why}", "-", "-", "-", "-", "-", "-"]


def _contestants(medians: Mapping[str, Medians]) -> Iterable[list[str]]:
    for contestant in CONTESTANTS:
        shown = [figure(numbers.get(contestant, {}).get(WORKLOADS[name].headline)) for name, numbers in medians.items()]
        if any(one != figure(None) for one in shown):
            yield [contestant, *shown]


def _notes(measured: Mapping[str, Any], medians: Mapping[str, Medians], usual_rounds: int) -> Iterable[str]:
    """Return who took no part, and why goals were missed: once for goals that have the same reason."""
    for name, workload in measured.items():
        if WORKLOADS[name].max_rounds < usual_rounds:
            yield f"- `{name}` was run {WORKLOADS[name].max_rounds} times only."
        absent = [one for one in WORKLOADS[name].contestants if one not in medians[name]]
        if absent:
            yield f"- `{name}` was run without {', '.join(absent)}."
        missed: dict[str, list[str]] = {}
        for goal in workload["goals"]:
            if why := goal.get("why_missed"):
                missed.setdefault(why, []).append(f'"{goal["text"]}"')
        for why, texts in missed.items():
            yield f"- `{name}` misses {', '.join(texts)}: {why}."


def _goal(goal: Mapping[str, Any]) -> str:
    return f"{_VERDICTS[goal['is_reached']]}: {goal['text'].removeprefix('aioloader ')}: {figure(goal['value'])}"


def _best(workload: Workload, medians: Medians, is_one: Callable[[str], bool]) -> str:
    """Return the numbers of the contestant with the best headline, and its name."""
    numbers = {name: one for name, one in medians.items() if is_one(name) and workload.headline in one}
    if not numbers:
        return figure(None)
    best = (max if workload.is_rate else min)(numbers, key=lambda name: numbers[name][workload.headline])
    return f"{_cell(workload, numbers[best])} {best}"


def _cell(workload: Workload, numbers: Mapping[str, float] | None) -> str:
    if not numbers:
        return figure(None)
    beside = "" if workload.beside is None else f" ({figure(numbers.get(workload.beside))})"
    return f"{figure(numbers.get(workload.headline))}{beside}"


def _medians(workload: Mapping[str, Any]) -> Medians:
    return {row["contestant"]: {name: one["median"] for name, one in row["numbers"].items()} for row in workload["rows"]}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
