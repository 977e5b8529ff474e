"""Hugging Face `datasets`: an `IterableDataset` read by the workers of a `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.benchmarks.feeds_torch import Collate, prefetch_factor
from tests.benchmarks.work import Work, in_batches

__all__ = ["streamed"]


@contextmanager
def streamed(work: Work, workers: int) -> Iterator[Iterable[Any]]:
    """Yield the batches of a stream with one shard per batch, which the workers take in turn: the order that everyone has."""
    from datasets import IterableDataset
    from torch.utils.data import DataLoader

    def read(batches: list[list[int]]) -> Iterator[dict[str, Any]]:
        for batch in batches:
            for index in batch:
                yield {"record": work.record(index)}

    def make(example: dict[str, Any]) -> dict[str, Any]:
        return dict(work.sample(example["record"]))

    stream = IterableDataset.from_generator(read, gen_kwargs={"batches": in_batches(work)}).map(make, remove_columns=["record"])
    yield DataLoader(stream, work.batch_size, num_workers=workers, collate_fn=Collate(work), prefetch_factor=prefetch_factor(work, workers))
