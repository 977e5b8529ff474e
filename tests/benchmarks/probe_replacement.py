"""How long a dead worker is missed: from SIGKILL to the first sample that the process in its place makes, and to its delivery."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from typing import Any

from tests.benchmarks.contestants import Feed
from tests.benchmarks.digest import Digest
from tests.benchmarks.task import Measurement

__all__ = ["measure"]

_PAUSE = 50
"""Batches before the first kill, in which every worker has a part, and between two kills."""


def measure(feed: Feed, num_kills: int, digest: Digest) -> Measurement:
    """Kill the worker that made the latest batch, `num_kills` times. Batches of one sample; `made` holds by whom and when."""
    made_ms: list[float] = []
    delivered_ms: list[float] = []
    arrivals_ns: list[int] = []
    known: set[int] = set()
    killed_at_ns, next_kill = 0, _PAUSE
    with feed as batches:
        for number, (batch, worker, made_at_ns) in enumerate(_split(batches)):
            arrivals_ns.append(time.monotonic_ns())
            digest.add(batch)
            if killed_at_ns and worker not in known:
                made_ms.append((made_at_ns - killed_at_ns) / 1e6)
                delivered_ms.append((arrivals_ns[-1] - killed_at_ns) / 1e6)
                killed_at_ns, next_kill = 0, number + _PAUSE
            known.add(worker)
            if not killed_at_ns and number >= next_kill and len(made_ms) < num_kills:
                killed_at_ns = time.monotonic_ns()
                os.kill(worker, signal.SIGKILL)
    return Measurement(
        numbers={"p50_ms": statistics.median(made_ms), "max_ms": max(made_ms), "delivered_p50_ms": statistics.median(delivered_ms)},
        num_records=digest.num_records,
        content=digest.content,
        order=digest.order,
        first_at_s=arrivals_ns[0] / 1e9,
        last_at_s=arrivals_ns[-1] / 1e9,
    )


def _split(batches: Any) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield each batch without `made`, which is different in every run, and what that says: process id, monotonic nanoseconds."""
    for batch in batches:
        fields = dict(batch)
        worker, made_at_ns = fields.pop("made")[0].tolist()
        yield fields, worker, made_at_ns
