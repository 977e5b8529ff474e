"""What one fresh process is asked to measure, and what it answers. Both travel as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

__all__ = ["Measurement", "Settings", "Task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is the same for all processes of a run.

    Attributes:
        workers: Worker processes or threads of each contestant.
        cache: Folder of the prepared data.
        iterations_per_ms: Turns of the Python loop that take 1 ms here, found once so that all do the same work.
        is_quick: Whether this is a smoke run: sizes that show that everything works, and no numbers to believe.
    """

    workers: int
    cache: str
    iterations_per_ms: int
    is_quick: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One contestant on one workload, once.

    Attributes:
        is_check: Whether to sum up every byte, on a run whose times do not count.
        launched_at_s: `time.monotonic()` when the process was started.
    """

    workload: str
    contestant: str
    num_records: int
    is_check: bool
    launched_at_s: float
    settings: Settings

    def to_json(self) -> str:
        """Return the task as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Return the task that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "settings": Settings(**fields["settings"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a process found.

    Attributes:
        numbers: By name; the unit is in the name.
        num_records: Records delivered.
        content: A sum over what was delivered, in whatever order.
        order: A sum that depends on the order too.
        first_at_s: `time.monotonic()` when the first batch came.
        last_at_s: And the last one.
    """

    numbers: dict[str, float]
    num_records: int
    content: int
    order: int
    first_at_s: float
    last_at_s: float

    def to_json(self) -> str:
        """Return the measurement as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """Return the measurement that `to_json` wrote."""
        return cls(**json.loads(text))
