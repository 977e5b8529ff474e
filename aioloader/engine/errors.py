"""How failures of foreign code become errors of ours, with the place where they happened."""

from __future__ import annotations

import traceback

from aioloader.engine.assembler import Stamps
from aioloader.errors import AioLoaderError, BatchError, PreprocessError, SourceError, WorkerError
from aioloader.pools.chunk import Failure

__all__ = ["batching_error", "preprocess_error", "source_error", "with_records"]


def source_error(error: BaseException) -> AioLoaderError:
    """Return the error for an upstream that failed."""
    if isinstance(error, AioLoaderError):
        return error
    text = "".join(traceback.format_exception(error))
    wrapped = SourceError(f"the upstream failed: {type(error).__name__}: {error}", remote_traceback=text)
    wrapped.__cause__ = error
    return wrapped


def batching_error(error: Exception) -> AioLoaderError:
    """Return the error for a batching that failed."""
    if isinstance(error, AioLoaderError):
        return error
    wrapped = BatchError(f"the batching strategy failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def preprocess_error(failure: Failure, stamps: Stamps, worker: str) -> AioLoaderError:
    """Return the error for a record, the first of `stamps`, on which the user's function failed or which killed its workers."""
    if isinstance(failure.error, WorkerError):
        return with_records(failure.error, stamps.at(0))
    error = PreprocessError(
        f"{failure.kind}: {failure.message}",
        seq=stamps.seqs[0],
        record=stamps.ids[0],
        lane=stamps.lanes[0],
        worker=worker,
        remote_traceback=failure.traceback,
    )
    error.__cause__ = failure.error
    return error


def with_records(error: AioLoaderError, stamps: Stamps) -> AioLoaderError:
    """Add to a worker's death which records it cost."""
    if not isinstance(error, WorkerError):
        return error
    return WorkerError(
        f"{error.message}; seq {stamps.seqs[0]} to {stamps.seqs[-1]} were not preprocessed",
        pid=error.pid,
        exitcode=error.exitcode,
        worker=error.worker,
        seqs=stamps.seqs,
        seq=stamps.seqs[0],
        record=stamps.ids[0],
        lane=stamps.lanes[0],
    )
