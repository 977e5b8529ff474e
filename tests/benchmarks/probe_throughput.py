"""Records per second, and CPU time per record of the whole process tree, between the first batch and the last."""

from __future__ import annotations

import os
import time

from tests.benchmarks.contestants import Feed
from tests.benchmarks.digest import Digest
from tests.benchmarks.task import Measurement
from tests.benchmarks.tree import tree_cpu_s
from tests.benchmarks.work import Work

__all__ = ["measure"]


def measure(feed: Feed, work: Work, digest: Digest) -> Measurement:
    """Read everything. The start, and the work on the first batch, do not count."""
    with feed as batches:
        iterator = iter(batches)
        digest.add(next(iterator))
        first_at_s = last_at_s = time.monotonic()
        first_cpu_s, first_records = tree_cpu_s(os.getpid()), digest.num_records
        for batch in iterator:
            digest.add(batch)
            last_at_s = time.monotonic()
        cpu_s = tree_cpu_s(os.getpid()) - first_cpu_s
    counted = digest.num_records - first_records
    return Measurement(
        numbers={"rate_per_s": counted / (last_at_s - first_at_s), "cpu_us_per_record": cpu_s / counted * 1e6},
        num_records=digest.num_records,
        content=digest.content,
        order=digest.order,
        first_at_s=first_at_s,
        last_at_s=last_at_s,
    )
