"""What a loader does to the training step beside it: the same step, timed while it rests and while it works.

The step is many small torch operations in one thread, as of a small model on the CPU or of launching kernels: the kind that
suffers when another thread wants the interpreter lock. Getting the batch is not part of it.

A loader rests once it has as many batches ready as it keeps. So a few steps without it and a few beside it can follow each other
within a quarter of a second, and a machine whose speed changes from second to second changes both.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from tests.benchmarks.contestants import Feed
from tests.benchmarks.digest import Digest
from tests.benchmarks.task import Measurement

__all__ = ["measure"]

_SIDE = 24
_BLOCK = 20
"""Steps in a row."""
_REST_S = 0.05
"""Within this, any loader here has made the batches that it keeps ready."""


def measure(feed: Feed, step_s: float, digest: Digest) -> Measurement:
    """Time a step for each batch, and as many without: the median over blocks of how much longer the median step of a block takes."""
    import torch

    torch.set_num_threads(1)
    step = _Step(torch, step_s)
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    arrivals_s = []
    with feed as batches:
        for number, batch in enumerate(batches):
            arrivals_s.append(time.monotonic())
            digest.add(batch)
            if number % _BLOCK == 0:
                time.sleep(_REST_S)
                alone.append([step.timed() for _ in range(_BLOCK)])
                beside.append([])
            beside[-1].append(step.timed())
    usual = statistics.median(time_s for block in alone for time_s in block)
    steady = sorted(time_s for block in beside for time_s in block)
    slowdowns = [statistics.median(block) / statistics.median(rest) for block, rest in zip(beside, alone, strict=True)]
    return Measurement(
        numbers={
            "slowdown_pct": (statistics.median(slowdowns) - 1) * 100,
            "slowdown_p95_pct": (steady[int(len(steady) * 0.95)] / usual - 1) * 100,
            "step_ms": usual * 1e3,
        },
        num_records=digest.num_records,
        content=digest.content,
        order=digest.order,
        first_at_s=arrivals_s[0],
        last_at_s=arrivals_s[-1],
    )


class _Step:
    """As many small operations as usually take `step_s`."""

    def __init__(self, torch: Any, step_s: float) -> None:
        self._torch = torch
        self._weights = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0)) / _SIDE
        self._num_turns = 100
        usual = statistics.median(self.timed() for _ in range(100))
        self._num_turns = max(1, round(100 * step_s / usual))

    def timed(self) -> float:
        """Run one step and return its seconds."""
        started = time.perf_counter()
        state = self._torch.ones(_SIDE, _SIDE)
        for _ in range(self._num_turns):
            state = self._torch.tanh(state @ self._weights + 0.1)
        return time.perf_counter() - started
