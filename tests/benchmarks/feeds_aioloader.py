"""aioloader, with its engine in a sidecar process and in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aioloader import FixedBatch, Loader, StackCollator
from tests.benchmarks.sharded_work import SHUFFLE, ShardedNumbers, Shards
from tests.benchmarks.work import Records, Stacked, Work

__all__ = ["sidecar", "thread"]


@contextmanager
def sidecar(work: Work, workers: int) -> Iterator[Loader]:
    """Yield a loader as it is by default."""
    with _loader(work, workers, "process") as loader:
        yield loader


@contextmanager
def thread(work: Work, workers: int) -> Iterator[Loader]:
    """Yield a loader whose engine is a thread of the trainer's process."""
    with _loader(work, workers, "thread") as loader:
        yield loader


def _loader(work: Work, workers: int, host: str) -> Loader:
    is_sharded = isinstance(work, ShardedNumbers)
    return Loader(
        Shards() if is_sharded else Records(work),
        preprocess=work.sample,
        batch=FixedBatch(work.batch_size),
        collate=StackCollator() if isinstance(work, Stacked) else work.collate,
        shuffle=SHUFFLE if is_sharded else None,
        workers=workers,
        buffer_size=work.window,
        host=host,
    )
