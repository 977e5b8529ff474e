"""The exception tree. Each class takes facts, keeps them as attributes and writes its own message.

    AioLoaderError
    ├── ConfigError(ValueError)     an argument is wrong; raised at construction where possible
    ├── SourceError                 the upstream failed while it was read
    ├── PreprocessError             the user's function failed on one record
    ├── BatchError                  batching or collation failed on one micro-batch
    ├── WorkerError                 a worker process died; its exit and the records it held are named
    ├── StallError                  a stage makes no progress
    ├── HostError                   the engine's host (sidecar or thread) ended or broke the protocol
    ├── ResumeError(ValueError)     a state does not fit this loader; every difference is listed
    ├── SynchronizationError        ranks disagree, or one did not show up in time
    ├── UnevenEndError              lanes end at different steps where they have to end together
    └── ClosedError                 the loader or iterator was closed before this call

Every message reads: where: expected X, got Y; do Z.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AioLoaderError",
    "BatchError",
    "ClosedError",
    "ConfigError",
    "HostError",
    "PreprocessError",
    "ResumeError",
    "SourceError",
    "StallError",
    "SynchronizationError",
    "UnevenEndError",
    "WorkerError",
]


class AioLoaderError(Exception):
    """Base of every error that aioloader raises on purpose."""


class ConfigError(AioLoaderError, ValueError):
    """An argument is wrong: `where` it was given, what was `expected`, what it `got`, what to `do`."""

    def __init__(self, where: str, *, expected: str, got: object, do: str) -> None:
        self.where = where
        self.expected = expected
        self.got = got
        self.do = do
        super().__init__(f"{where}: expected {expected}, got {got}; {do}.")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class _LocatedError(AioLoaderError):
    """An error at one record of one stage."""

    stage = "?"

    def __init__(
        self,
        message: str,
        *,
        seq: int | None = None,
        record: tuple[str, int] | None = None,
        lane: int | None = None,
        worker: str | None = None,
        remote_traceback: str | None = None,
    ) -> None:
        self.message = message
        self.seq = seq
        self.record = record
        self.lane = lane
        self.worker = worker
        self.remote_traceback = remote_traceback
        facts = [f"stage {self.stage}"]
        if record is not None:
            facts.append(f"record {record[0]}[{record[1]}]")
        if seq is not None:
            facts.append(f"seq {seq}")
        if lane is not None:
            facts.append(f"lane {lane}")
        if worker is not None:
            facts.append(f"worker {worker}")
        text = f"{', '.join(facts)}: {message}"
        if remote_traceback:
            text = f"{text}\n\n{remote_traceback.rstrip()}"
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class SourceError(_LocatedError):
    """The upstream failed. Everything it yielded before was delivered; the original is `__cause__`."""

    stage = "source"


class PreprocessError(_LocatedError):
    """`preprocess` failed on one record. Everything before it was delivered; the original is `__cause__`."""

    stage = "preprocess"


class BatchError(_LocatedError):
    """Batching or the collator failed on one micro-batch. The original is `__cause__`."""

    stage = "collate"


class WorkerError(_LocatedError):
    """A worker process died. `seqs` are the first and last sequence numbers of each lane it held."""

    stage = "worker"

    def __init__(
        self,
        message: str,
        *,
        pid: int | None = None,
        exitcode: int | None = None,
        seqs: Sequence[int] = (),
        worker: str | None = None,
        seq: int | None = None,
        record: tuple[str, int] | None = None,
        lane: int | None = None,
    ) -> None:
        super().__init__(message, seq=seq, record=record, lane=lane, worker=worker)
        self.pid = pid
        self.exitcode = exitcode
        self.seqs = tuple(seqs)


class HostError(AioLoaderError):
    """The engine's host ended, or said something that the protocol does not allow."""


class StallError(AioLoaderError):
    """A stage made no progress for longer than `stall_timeout_s`: `stage`, and in the message where each worker stands."""

    def __init__(self, stage: str, message: str) -> None:
        self.stage = stage
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class ResumeError(AioLoaderError, ValueError):
    """A state does not fit this loader, or states do not fit each other. `differences` lists (what, saved, present) for each mismatch."""

    def __init__(self, differences: Sequence[tuple[str, object, object]], *, do: str, where: str | None = None) -> None:
        self.differences = tuple(differences)
        self.do = do
        here, there = (" (this loader)", " (the state)") if where is None else ("", "")
        lines = "".join(f"\n  {what}: expected {present!r}{here}, got {saved!r}{there}" for what, saved, present in differences)
        super().__init__(f"{where or 'load_state_dict: the state does not belong to this loader'}:{lines}\n{do}.")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class SynchronizationError(AioLoaderError):
    """Ranks disagree or one is missing: `operation`, the `missing` ranks where known."""

    def __init__(self, operation: str, message: str, *, missing: Sequence[int] = ()) -> None:
        self.operation = operation
        self.missing = tuple(missing)
        super().__init__(f"{operation}: {message}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class UnevenEndError(AioLoaderError):
    """Lanes end at different steps under `end="error"` or `"repeat"`: one before step `smallest`, another at `largest` or later."""

    def __init__(self, smallest: int, largest: int) -> None:
        self.smallest = smallest
        self.largest = largest
        super().__init__(
            f"end of data: expected all lanes to have equally many micro-batches, got one that ends before step {smallest} and one "
            f"that goes on to step {largest} at least; use end='drop' or end='pad', or preprocess each record to one sample and "
            "use end='repeat'"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class ClosedError(AioLoaderError):
    """The loader or iterator was closed, or a newer iterator took its place."""


def _rebuild(cls: type[AioLoaderError], args: tuple[object, ...], attributes: dict[str, object]) -> AioLoaderError:
    """Recreate an error on the other side of a process border without running its constructor again."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
