"""Which documents failed, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aioloader.protocols import RecordId

__all__ = ["FailedDocument", "read_failure_log", "read_failures", "write_failures"]


@dataclass(frozen=True, slots=True)
class FailedDocument:
    """A document that was left out.

    Attributes:
        place: Where it is, e.g. `data/a.jsonl:17`.
        error: What was wrong with it.
    """

    place: str
    error: str


def read_failure_log(path: Path) -> dict[RecordId, str]:
    """Return the error of each record in a quarantine log; a run that was killed and went on may have written one twice."""
    errors: dict[RecordId, str] = {}
    if path.exists():
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    entry = json.loads(line)
                    errors.setdefault((entry["record"][0], entry["record"][1]), entry["error"])
                except (ValueError, TypeError, KeyError):  # the last line of a killed run
                    continue
    return errors


def write_failures(path: Path, failures: Sequence[FailedDocument]) -> None:
    """Write one JSON line for each, in the order of the data; no file where there is none."""
    if failures:
        path.write_text("".join(json.dumps(asdict(failure)) + "\n" for failure in failures), encoding="utf-8")


def read_failures(path: Path) -> list[FailedDocument]:
    """Return what `write_failures` wrote."""
    if not path.exists():
        return []
    return [FailedDocument(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
