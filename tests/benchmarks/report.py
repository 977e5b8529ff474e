"""The results as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.benchmarks.contestants import OURS, REFERENCES
from tests.benchmarks.figures import figure
from tests.benchmarks.goals import BEST_PEER, DATALOADER, Medians, Rounds, Verdict, judge, median_ratio, medians_of, reference
from tests.benchmarks.rounds import Result
from tests.benchmarks.workloads import NOT_MEASURED

__all__ = ["as_json", "as_text", "head", "medians", "tail", "verdicts"]

_NO_COLUMN = {"cpu_total_s"}
_FLOOR = "floor"


def head(facts: dict[str, Any]) -> str:
    """Return what a reader must know of a run: command, hardware, versions, date."""
    machine, versions = facts["machine"], facts["versions"]
    return "\n".join(
        [
            f"command   {facts['command']}",
            f"date      {facts['date']}",
            f"machine   {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, "
            f"load before {machine['load_before']}",
            f"versions  {', '.join(f'{name} {version}' for name, version in versions.items())}",
            f"workers   {facts['workers']}; fresh process for each run; contestants by turns; "
            f"{facts['rounds'] or 'no'} timed rounds after a checked one{'; QUICK: numbers not to believe' if facts['is_quick'] else ''}",
        ]
    )


def tail() -> str:
    """Return what no run measures, and why."""
    return "\n".join(f"not measured: {what}: {why}" for what, why in NOT_MEASURED.items())


def medians(result: Result) -> Medians:
    """Return contestant -> number -> median."""
    return medians_of(_rounds(result))


def verdicts(result: Result, *, workers: int) -> list[Verdict]:
    """Return what became of each goal of the workload."""
    found = _rounds(result)
    return [judge(goal, found, workers=workers) for goal in result.workload.goals]


def as_text(result: Result, *, workers: int, cores: int) -> str:
    """Return the table of one workload, best first, with the goals below it."""
    workload = result.workload
    lines = [f"{workload.name}: {workload.title}; {result.num_records} records"]
    lines += _table(result)
    lines += [f"  left out: {name}: {reason}" for name, reason in result.left_out.items()]
    lines += [f"  NOT THE SAME WORK: {text}" for text in result.disagreements]
    lines += _ratios(result, workers)
    lines += _above_floor(result)
    for verdict in verdicts(result, workers=workers):
        word = {True: "reached", False: "MISSED", None: "not judged"}[verdict.is_reached]
        value = "" if verdict.value is None else f": {verdict.value:.3g}"
        lines.append(f"  {word}: {verdict.goal.text}{value}")
        if why := _why(result, verdict, workers, cores):
            lines.append(f"    why: {why}")
    return "\n".join(lines)


def as_json(results: Iterable[Result], facts: dict[str, Any], *, workers: int, cores: int) -> dict[str, Any]:
    """Return everything that was measured, and what was not."""
    return {**facts, "workloads": [_result_json(result, workers, cores) for result in results], "not_measured": NOT_MEASURED}


def _rounds(result: Result) -> Rounds:
    return {row.contestant: {name: summary.values for name, summary in row.numbers.items()} for row in result.rows}


def _why(result: Result, verdict: Verdict, workers: int, cores: int) -> str:
    reason = result.workload.why_missed
    return reason(verdict.goal, medians(result), workers=workers, cores=cores) if reason and verdict.is_reached is False else ""


def _table(result: Result) -> list[str]:
    headline = result.workload.headline
    rows = sorted(
        (row for row in result.rows if headline in row.numbers),
        key=lambda row: row.numbers[headline].median,
        reverse=result.workload.is_rate,
    )
    names = list(dict.fromkeys(name for row in rows for name in row.numbers if name not in _NO_COLUMN))
    cells = [["contestant", headline, "lowest", "highest", *(name for name in names if name != headline)]]
    for row in rows:
        main = row.numbers[headline]
        others = [row.numbers[name].median if name in row.numbers else None for name in names if name != headline]
        cells.append([row.contestant, *map(figure, (main.median, main.lowest, main.highest)), *map(figure, others)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


def _ratios(result: Result, workers: int) -> list[str]:
    """Return how ours compare with `DataLoader` and with the best peer, by the headline, at the median of the rounds."""
    workload, found = result.workload, _rounds(result)
    if workload.headline.endswith("_pct"):  # near zero, where a ratio says nothing; the goals compare by difference
        return []
    lines = []
    for ours in OURS:
        values = found.get(ours, {}).get(workload.headline)
        for name in (DATALOADER, BEST_PEER):
            others = reference(name, workload.headline, found, workers=workers, is_rate=workload.is_rate)
            if (ratio := median_ratio(values, others)) is not None:
                lines.append(f"  {ours} / {name}: {ratio:.3g} ({'more' if workload.is_rate else 'less'} is better)")
    return lines


def _above_floor(result: Result) -> list[str]:
    """Return by how much each number of ours is above what any loader takes."""
    found = medians(result)
    floor = found.get(_FLOOR, {})
    lines = []
    for ours in OURS:
        shared = [(name, value, floor[name]) for name, value in found.get(ours, {}).items() if name in floor and name not in _NO_COLUMN]
        if shared:
            text = "; ".join(f"{name} {figure(value)} - {figure(least)} = {figure(value - least)}" for name, value, least in shared)
            lines.append(f"  {ours} - {_FLOOR}: {text}")
    return lines


def _result_json(result: Result, workers: int, cores: int) -> dict[str, Any]:
    return {
        "name": result.workload.name,
        "title": result.workload.title,
        "num_records": result.num_records,
        "headline": result.workload.headline,
        "more_is_better": result.workload.is_rate,
        "rows": [
            {
                "contestant": row.contestant,
                "rounds": row.rounds,
                "is_peer": row.contestant not in (*OURS, *REFERENCES),
                "numbers": {
                    name: {"median": one.median, "lowest": one.lowest, "highest": one.highest, "rounds": one.values}
                    for name, one in row.numbers.items()
                },
            }
            for row in result.rows
        ],
        "left_out": result.left_out,
        "disagreements": result.disagreements,
        "goals": [
            {
                "text": verdict.goal.text,
                "value": verdict.value,
                "is_reached": verdict.is_reached,
                "why_missed": _why(result, verdict, workers, cores),
            }
            for verdict in verdicts(result, workers=workers)
        ],
    }
