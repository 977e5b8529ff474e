"""What a run of preprocessing tells: while it runs, and at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aioloader.preprocess.failures import FailedDocument
from aioloader.tokens.metadata import Metadata

__all__ = ["Event", "Preprocessed"]

Status = Literal["written", "reused", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Where a run stands.

    Attributes:
        kind: "waiting" for another process that writes to the same directory, "resumed" from where a killed run stood, "running".
        num_documents: Documents written by this run so far; `num_tokens` their tokens.
        fraction: The share of the input that was read, where known.
    """

    kind: Literal["waiting", "resumed", "running"]
    num_documents: int = 0
    num_tokens: int = 0
    fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessed:
    """What came of it.

    Attributes:
        status: "written"; "reused": an earlier run with the same settings had finished, nothing was written; "failed": every document
            failed, and nothing was kept.
        output: The directory.
        num_documents: Documents in the output; `num_failed` those that were left out.
        failures: The latter, in the order of the data.
        metadata: What `metadata.json` says; None if all failed.
    """

    status: Status
    output: Path
    num_documents: int
    failures: Sequence[FailedDocument]
    metadata: Metadata | None

    @property
    def num_failed(self) -> int:
        """Return how many documents failed."""
        return len(self.failures)
