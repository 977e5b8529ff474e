"""torch's own loaders: `DataLoader`, and those of torchdata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.work import MakeBatch, Sample, Work, in_batches, to_tensors

__all__ = ["Collate", "forkserver", "iterable", "map_style", "nodes_process", "nodes_thread", "prefetch_factor", "spawned", "stateful"]

_DEFAULT_PREFETCH_FACTOR = 2


def prefetch_factor(work: Work, workers: int) -> int:
    """Return how many batches each worker may be ahead: the same window as everyone has, but not less than the default."""
    return max(_DEFAULT_PREFETCH_FACTOR, work.window // (work.batch_size * workers))


@contextmanager
def map_style(work: Work, workers: int) -> Iterator[Iterable[Any]]:
    """Yield a `DataLoader` over a map-style dataset, with the start method that it has by default."""
    yield _data_loader(_MapStyle(work), work, workers)


@contextmanager
def spawned(work: Work, workers: int) -> Iterator[Iterable[Any]]:
    """Yield a `DataLoader` whose workers are fresh interpreters."""
    yield _data_loader(_MapStyle(work), work, workers, multiprocessing_context="spawn")


@contextmanager
def forkserver(work: Work, workers: int) -> Iterator[Iterable[Any]]:
    """Yield a `DataLoader` whose workers are forked from a clean process."""
    yield _data_loader(_MapStyle(work), work, workers, multiprocessing_context="forkserver")


@contextmanager
def iterable(work: Work, workers: int) -> Iterator[Iterable[Any]]:
    """Yield a `DataLoader` over an iterable dataset; each worker reads the records of its own batches only."""
    yield _data_loader(_iterable_dataset(work), work, workers)


@contextmanager
def stateful(work: Work, workers: int) -> Iterator[Iterable[Any]]:
    """Yield torchdata's `StatefulDataLoader` over a map-style dataset."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    yield StatefulDataLoader(
        _MapStyle(work), work.batch_size, num_workers=workers, collate_fn=_collate(work), prefetch_factor=prefetch_factor(work, workers)
    )


@contextmanager
def nodes_process(work: Work, workers: int) -> Iterator[Iterable[Any]]:
    """Yield a pipeline of torchdata.nodes that maps over batches in processes."""
    yield _nodes(work, workers, "process")


@contextmanager
def nodes_thread(work: Work, workers: int) -> Iterator[Iterable[Any]]:
    """Yield a pipeline of torchdata.nodes that maps over batches in threads."""
    yield _nodes(work, workers, "thread")


@dataclass(frozen=True, slots=True)
class Collate:
    """Collates as everyone does, and makes tensors of it."""

    work: Work

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return to_tensors(self.work.collate(samples))


@dataclass(frozen=True, slots=True)
class _MapStyle:
    work: Work

    def __len__(self) -> int:
        return self.work.num_records

    def __getitem__(self, index: int) -> Sample:
        return self.work.sample(self.work.record(index))


def _data_loader(dataset: Any, work: Work, workers: int, **options: Any) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset, work.batch_size, num_workers=workers, collate_fn=_collate(work), prefetch_factor=prefetch_factor(work, workers), **options
    )


def _collate(work: Work) -> Any:
    """Return torch's own collator for large samples, which stacks them in shared memory and so saves a copy; else everyone's."""
    from torch.utils.data import default_collate

    return default_collate if work.is_large else Collate(work)


def _iterable_dataset(work: Work) -> Any:
    from torch.utils.data import IterableDataset, get_worker_info

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is not None, "the benchmark reads with workers"
            for batch in in_batches(work)[info.id :: info.num_workers]:
                for index in batch:
                    yield work.sample(work.record(index))

    return Stream()


def _nodes(work: Work, workers: int, method: str) -> Iterable[Any]:
    from torchdata import nodes

    indices = nodes.Batcher(nodes.IterableWrapper(range(work.num_records)), work.batch_size)
    mapped = nodes.ParallelMapper(indices, MakeBatch(work, as_tensors=True), num_workers=workers, method=method, in_order=True)
    loader: Iterable[Any] = nodes.Loader(nodes.Prefetcher(mapped, prefetch_factor=workers * prefetch_factor(work, workers)))
    return loader
