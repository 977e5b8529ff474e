"""The trainer's side of the engine: what it received early and never opened is let go of like everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aioloader import FixedBatch, Loader


def large(number: int) -> Any:
    return np.full(100_000, number, np.int32)


def stacked(samples: list[Any]) -> dict[str, Any]:
    return {"x": np.stack(samples)}


@pytest.mark.parametrize("host", ["process", "thread"])
def test_batches_that_came_before_the_numbers_asked_for_are_delivered_in_order(host: str) -> None:
    with Loader(range(20), preprocess=large, batch=FixedBatch(1), collate=stacked, workers=1, pool="thread", host=host) as loader:
        seen = []
        for batch in loader:
            seen.append(int(batch["x"][0, 0]))
            loader.stats()
        assert seen == list(range(20))


@pytest.mark.parametrize("host", ["process", "thread"])
def test_batches_that_came_early_and_are_never_taken_leave_nothing(host: str) -> None:
    """What is left is found by the check around every test."""
    with Loader(range(20), preprocess=large, batch=FixedBatch(1), collate=stacked, workers=1, pool="thread", host=host) as loader:
        iterator = iter(loader)
        next(iterator)
        while loader.stats()["waiting_batches"] < 2:
            pass
