"""Functions that leave lanes with unequal numbers of samples; light, since workers import it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

NUM_LANES = 6
NUM_RECORDS = 120


def uneven(number: int) -> int | None:
    """Lane 1 keeps half of its records, lane 4 two thirds, the others all."""
    lane, seq = number % NUM_LANES, number // NUM_LANES
    if (lane == 1 and seq % 2) or (lane == 4 and seq % 3 == 2):
        return None
    return number


def uneven_slowly(number: int) -> int | None:
    time.sleep(0.01)
    return uneven(number)


def fails_at_20(number: int) -> int | None:
    if number == 20:
        raise ValueError("record 20 is bad")
    return uneven(number)


def tokens(number: int) -> Any:
    """What a small language model is trained on; None for the same records."""
    if uneven(number) is None:
        return None
    return {"input_ids": np.arange(number, number + 5) % 17}


def as_field(samples: list[int]) -> dict[str, Any]:
    numbers = np.array(samples)
    return {"labels": numbers, "x": np.stack([numbers, numbers], 1).astype(np.float32), "name": str(samples[0])}
