"""Functions that say which process of the job ran them; light, since workers import it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.contract.uneven import as_field, uneven


def with_reader(number: int) -> Any:
    """Return which process of the job preprocessed the record."""
    return None if uneven(number) is None else {"number": number, "reader": int(os.environ["RANK"])}


def collate(samples: list[Any]) -> dict[str, Any]:
    fields = as_field([sample["number"] for sample in samples])
    return {**fields, "reader": np.array([sample["reader"] for sample in samples])}


def with_long_text(samples: list[Any]) -> dict[str, Any]:
    """More than fits in the head of a message."""
    return {**collate(samples), "name": "x" * 40_000, "empty": np.zeros((0, 3), np.float32), "scalar": np.float64(1.5)}


def keep(number: int) -> Any:
    return {"number": number, "reader": int(os.environ["RANK"])}


def fails_and_says_so(number: int) -> Any:
    """Every fifth record fails; each call for one leaves a trace."""
    if number % 5 == 3:
        with open(os.environ["CALLS"], "a") as calls:
            calls.write(f"{number}\n")
        raise ValueError(f"record {number} is bad")
    return plain(number)


def plain(number: int) -> Any:
    return {"number": number, "reader": 0}


def fails_where_told(number: int) -> Any:
    if str(number) == os.environ.get("BAD_RECORD"):
        raise ValueError(f"record {number} is bad")
    return uneven(number)


def slowly(number: int) -> Any:
    """The records after the first few take long, until somebody says that they need not."""
    until = time.monotonic() + 5
    while number > 20 and "QUICKLY" not in os.environ and time.monotonic() < until:
        time.sleep(0.01)
    return uneven(number)


class Part:
    """Records of one data-parallel rank, which are not told apart by their names."""

    def __init__(self, dp_rank: int) -> None:
        self.first = 1000 * dp_rank

    def __iter__(self) -> Iterator[int]:
        yield from range(self.first, self.first + 24)

    def fingerprint(self) -> Any:
        return {"kind": "part"}


def by_global_rank(number: int) -> Any:
    return {"number": number + 1000 * int(os.environ["RANK"]), "reader": 0}


def unseeded(number: int) -> Any:
    return {"number": number, "reader": random.SystemRandom().randrange(1 << 30)}


class Lengths:
    """Records whose number of samples depends on the global rank."""

    def __call__(self, number: int) -> Any:
        return [plain(number)] * (2 if os.environ["RANK"] == "3" and number == 7 else 1)


def tokens(number: int) -> Any:
    return {"input_ids": np.arange(1 + number % 11) + number}
