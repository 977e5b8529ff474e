"""Grain: a map-style pipeline whose batches are made in worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.benchmarks.feeds_torch import prefetch_factor
from tests.benchmarks.work import Work, to_tensors

__all__ = ["multiprocess"]


@contextmanager
def multiprocess(work: Work, workers: int) -> Iterator[Iterator[Any]]:
    """Yield Grain's batches; each worker reads with one thread, since the work holds the interpreter lock."""
    import grain

    batches = grain.MapDataset.range(work.num_records).map(work.record).map(work.sample).batch(work.batch_size, batch_fn=work.collate)
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch_factor(work, workers))
    processes = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=prefetch_factor(work, workers))
    iterator = iter(batches.to_iter_dataset(reading).mp_prefetch(processes))
    try:
        yield map(to_tensors, iterator)
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
