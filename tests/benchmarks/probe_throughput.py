"""Records per second, and CPU time per record, of the whole process tree and by process, between the first batch and the last."""

from __future__ import annotations

import os
import time

from tests.benchmarks.contestants import Feed
from tests.benchmarks.digest import Digest
from tests.benchmarks.task import Measurement
from tests.benchmarks.tree import cpu_by_process_s
from tests.benchmarks.work import Work

__all__ = ["measure"]


def measure(feed: Feed, work: Work, digest: Digest) -> Measurement:
    """Read everything. The start, and the work on the first batch, do not count."""
    with feed as batches:
        iterator = iter(batches)
        digest.add(next(iterator))
        first_at_s = last_at_s = time.monotonic()
        first_cpu_s, first_records = cpu_by_process_s(os.getpid()), digest.num_records
        for batch in iterator:
            digest.add(batch)
            last_at_s = time.monotonic()
        last_cpu_s = cpu_by_process_s(os.getpid())
    counted = digest.num_records - first_records
    cpu_us = {whose: (seconds - first_cpu_s.get(whose, 0.0)) / counted * 1e6 for whose, seconds in last_cpu_s.items()}
    return Measurement(
        numbers={
            "rate_per_s": counted / (last_at_s - first_at_s),
            "cpu_us_per_record": sum(cpu_us.values()),
            **{f"{whose}_us_per_record": one for whose, one in cpu_us.items()},
        },
        num_records=digest.num_records,
        content=digest.content,
        order=digest.order,
        first_at_s=first_at_s,
        last_at_s=last_at_s,
    )
