"""Reads very many tiny records; the process that launched this one watches the memory of its tree meanwhile."""

from __future__ import annotations

import time

from tests.benchmarks.contestants import Feed
from tests.benchmarks.digest import Digest
from tests.benchmarks.task import Measurement

__all__ = ["measure"]


def measure(feed: Feed, digest: Digest) -> Measurement:
    """Read everything and note when."""
    with feed as batches:
        iterator = iter(batches)
        digest.add(next(iterator))
        first_at_s = time.monotonic()
        for batch in iterator:
            digest.add(batch)
        last_at_s = time.monotonic()
    return Measurement(
        numbers={}, num_records=digest.num_records, content=digest.content, order=digest.order, first_at_s=first_at_s, last_at_s=last_at_s
    )
