"""What Python has: a loop in one process, and `multiprocessing.Pool`."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.work import MakeBatch, Sample, Work, in_batches, to_tensors

__all__ = ["floor", "nothing", "pool", "pool_64", "serial"]


@contextmanager
def serial(work: Work, workers: int) -> Iterator[Iterator[Any]]:
    """Make the batches here, one after the other: the rate that `workers` processes could multiply at best."""
    yield map(MakeBatch(work, as_tensors=True), in_batches(work))


@contextmanager
def nothing(work: Work, workers: int) -> Iterator[Iterator[Any]]:
    """Hand over one and the same batch again and again: what a trainer does without a loader."""
    batches = in_batches(work)
    batch = MakeBatch(work, as_tensors=True)(batches[0])
    yield (batch for _ in batches)


@contextmanager
def floor(work: Work, workers: int) -> Iterator[Iterable[Any]]:
    """Read and load a message that is there, and make tensors over memory that is there: what batches of other processes take at least."""
    arrays = [MakeBatch(work, as_tensors=False)(indices) for indices in in_batches(work)]
    message = pickle.dumps(list(range(work.batch_size)))
    descriptor = os.memfd_create("messages")
    try:
        os.write(descriptor, message * len(arrays))
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield _Messages(to_tensors(batch) for batch in arrays if pickle.loads(os.read(descriptor, len(message))))
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Messages:
    batches: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    async def __aiter__(self) -> AsyncIterator[Any]:
        for batch in self.batches:
            yield batch


@contextmanager
def pool(work: Work, workers: int) -> Iterator[Iterator[Any]]:
    """Map over the records with the default chunk size of `Pool.imap`: 1."""
    with multiprocessing.Pool(workers) as processes:
        yield _collated(work, processes.imap(_MakeSample(work), range(work.num_records)))


@contextmanager
def pool_64(work: Work, workers: int) -> Iterator[Iterator[Any]]:
    """Map over the records in chunks of 64."""
    with multiprocessing.Pool(workers) as processes:
        yield _collated(work, processes.imap(_MakeSample(work), range(work.num_records), chunksize=64))


@dataclass(frozen=True, slots=True)
class _MakeSample:
    work: Work

    def __call__(self, index: int) -> Sample:
        return self.work.sample(self.work.record(index))


def _collated(work: Work, samples: Iterator[Sample]) -> Iterator[Any]:
    waiting: list[Sample] = []
    for sample in samples:
        waiting.append(sample)
        if len(waiting) == work.batch_size:
            yield to_tensors(work.collate(waiting))
            waiting = []
