"""What a loader does to the training step beside it: the same step, timed without a loader and while one runs.

The step is many small torch operations in one thread, as of a small model on the CPU or of launching kernels: the kind that
suffers when another thread wants the interpreter lock. Getting the batch is not part of it.
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
_WARM_UP = 10


def measure(feed: Feed, step_s: float, num_steps: int, digest: Digest) -> Measurement:
    """Time `num_steps` steps before, beside and after the loader; the median beside it over the median of the others."""
    import torch

    torch.set_num_threads(1)
    step = _Step(torch, step_s)
    alone = [step.timed() for _ in range(num_steps)]
    beside = []
    with feed as batches:
        iterator = iter(batches)
        arrivals_s = []
        for batch in iterator:
            arrivals_s.append(time.monotonic())
            digest.add(batch)
            beside.append(step.timed())
    alone += [step.timed() for _ in range(num_steps)]
    usual = statistics.median(alone)
    steady = sorted(beside[_WARM_UP:])
    return Measurement(
        numbers={
            "slowdown_pct": (statistics.median(steady) / usual - 1) * 100,
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
    """As many small operations as take `step_s` when nothing disturbs them."""

    def __init__(self, torch: Any, step_s: float) -> None:
        self._torch = torch
        self._weights = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0)) / _SIDE
        self._num_turns = 100
        fastest = min(self.timed() for _ in range(30))
        self._num_turns = max(1, round(100 * step_s / fastest))

    def timed(self) -> float:
        """Run one step and return its seconds."""
        started = time.perf_counter()
        state = self._torch.ones(_SIDE, _SIDE)
        for _ in range(self._num_turns):
            state = self._torch.tanh(state @ self._weights + 0.1)
        return time.perf_counter() - started
