"""From the start of the interpreter to the first batch, imports included."""

from __future__ import annotations

import time

from tests.benchmarks.contestants import Feed
from tests.benchmarks.digest import Digest
from tests.benchmarks.task import Measurement

__all__ = ["measure"]


def measure(feed: Feed, launched_at_s: float, digest: Digest) -> Measurement:
    """Note when the first batch came, then read the rest."""
    with feed as batches:
        iterator = iter(batches)
        first = next(iterator)
        first_at_s = time.monotonic()
        digest.add(first)
        for batch in iterator:
            digest.add(batch)
        last_at_s = time.monotonic()
    return Measurement(
        numbers={"first_batch_ms": (first_at_s - launched_at_s) * 1e3},
        num_records=digest.num_records,
        content=digest.content,
        order=digest.order,
        first_at_s=first_at_s,
        last_at_s=last_at_s,
    )
