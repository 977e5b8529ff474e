"""What every batcher counts, under the same names, so that sums over lanes and ranks need no case distinction."""

from __future__ import annotations

from typing import Final

__all__ = ["COUNTERS", "zero_counters"]

COUNTERS: Final = (
    "dropped_samples",
    "dropped_tokens",
    "truncated_samples",
    "truncated_tokens",
    "empty_samples",
    "alone_samples",
    "alone_tokens",
    "early_groups",
)
"""Samples left out whole and their tokens; samples cut and the tokens cut off them; samples of length zero. Nothing else is left out.

Over-long samples that have a micro-batch of their own, and their tokens; micro-batches closed before they were full because a
sample in them had waited long enough, or too many were waiting.
"""


def zero_counters() -> dict[str, int]:
    """Return a fresh dict with every counter at zero."""
    return dict.fromkeys(COUNTERS, 0)
