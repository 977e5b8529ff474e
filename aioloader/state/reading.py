"""States for people: what one says, and where two differ."""

from __future__ import annotations

from typing import Any

from aioloader.protocols import Json
from aioloader.state.schema import check_schema, differences

__all__ = ["describe", "diff"]


def describe(state: Json) -> str:
    """Return what a state says: where the run stands, what became of its records, and what it belongs to. Some lines of text.

    Raises:
        ResumeError: It is no state of a loader.
    """
    check_schema(state)
    lanes = state["lanes"].values()
    who = f"all {state['dp_size']} ranks" if state["dp_rank"] is None else f"rank {state['dp_rank']} of {state['dp_size']}"
    steps = sorted({lane["step"] for lane in lanes})
    place = state["source"]
    lines = [
        f"{who}, lanes {', '.join(state['lanes'])} of {state['num_lanes']}",
        f"after step {' to '.join(map(str, dict.fromkeys((steps[0], steps[-1]))))}; epochs {_span([lane['epoch'] for lane in lanes])}",
        f"reads from epoch {place['epoch']}, position {place['position']}",
        *(f"{name.replace('_', ' ')}: {number}" for name, number in _totals(state).items() if number),
        *(f"source {name}: {number} records drawn up to there" for name, number in _drawn(place["cursor"]).items()),
        *(f"{name}: {value}" for name, value, _ in differences(state["fingerprint"], {})),
    ]
    return "\n".join(lines)


def diff(left: Json, right: Json) -> list[tuple[str, Any, Any]]:
    """Return (name, left, right) of every entry in which two states differ, sorted by name; names are joined by dots."""
    return differences(left, right)


def _totals(state: Json) -> dict[str, int]:
    totals: dict[str, int] = {}
    for lane in state["lanes"].values():
        for name, number in lane["counts"].items():
            totals[name] = totals.get(name, 0) + number
    return totals


def _drawn(cursor: Json) -> dict[str, int]:
    """Return how many records of each source of a mixture come before the place from which is read; nothing for other sources."""
    drawer = cursor.get("drawer") if isinstance(cursor, dict) else None
    return dict(drawer["drawn"]) if drawer else {}


def _span(numbers: list[int]) -> str:
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"
