"""SPDL: a pipeline over a pool of processes, in order, and one with a region of stages in processes, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.benchmarks.feeds_torch import prefetch_factor
from tests.benchmarks.work import MakeBatch, Work, in_batches, to_tensors

__all__ = ["process_pool", "region"]


@contextmanager
def process_pool(work: Work, workers: int) -> Iterator[Iterator[Any]]:
    """Yield whole batches made by a `ProcessPoolExecutor`, in order."""
    from spdl.pipeline import PipelineBuilder

    in_flight = workers * prefetch_factor(work, workers)
    with ProcessPoolExecutor(workers, initializer=_load_torch if work.is_large else None) as processes:
        pipeline = (
            PipelineBuilder()
            .add_source(in_batches(work))
            .pipe(_make_batch(work), executor=processes, concurrency=in_flight, output_order="input")
            .add_sink(prefetch_factor(work, workers))
            .build(num_threads=1)
        )
        with pipeline.auto_stop():
            yield map(to_tensors, pipeline.get_iterator())


@contextmanager
def region(work: Work, workers: int) -> Iterator[Iterator[Any]]:
    """Yield whole batches made by a region of stages in worker processes, as they are done."""
    from spdl.pipeline import PipelineBuilder
    from spdl.pipeline.defs import MAIN_PROCESS, ProcessPoolExecutorConfig

    pipeline = (
        PipelineBuilder()
        .add_source(in_batches(work))
        .to(ProcessPoolExecutorConfig(max_workers=workers))
        .pipe(_make_batch(work))
        .to(MAIN_PROCESS)
        .add_sink(prefetch_factor(work, workers))
        .build(num_threads=1)
    )
    with pipeline.auto_stop():
        yield map(to_tensors, pipeline.get_iterator())


def _make_batch(work: Work) -> MakeBatch:
    """Return what makes a batch: of tensors where it is large, since torch moves those through shared memory, else of arrays."""
    return MakeBatch(work, as_tensors=work.is_large)


def _load_torch() -> None:
    """Teach this process to send tensors through shared memory."""
    import torch.multiprocessing  # noqa: F401
