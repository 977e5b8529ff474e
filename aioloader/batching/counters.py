"""What every batcher counts, under the same names, so that sums over lanes and ranks need no case distinction."""

from __future__ import annotations

from typing import Final

__all__ = ["COUNTERS", "zero_counters"]

COUNTERS: Final = ("dropped_samples", "dropped_tokens", "truncated_samples", "truncated_tokens", "empty_samples")
"""Samples left out whole and their tokens; samples cut and the tokens cut off them; samples of length zero."""


def zero_counters() -> dict[str, int]:
    """Return a fresh dict with every counter at zero."""
    return dict.fromkeys(COUNTERS, 0)
