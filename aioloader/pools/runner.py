"""Runs the user's function on the records of a chunk: the one place where preprocessing happens, whatever the pool."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioloader.faults import class_names
from aioloader.pools.chunk import Chunk, Failure, Outcome
from aioloader.pools.rng import Seeding
from aioloader.pools.sizes import sample_nbytes
from aioloader.protocols import Record, RecordId, Sample

__all__ = ["Preprocess", "Runner", "describe_failure"]

_WORKER_INIT: RecordId = ("worker_init", 0)
"""Seeds the random numbers of `worker_init`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """The user's preprocessing, as it travels to workers.

    Attributes:
        function: record -> sample, list of samples or None; None passes records through.
        batched: The function maps a dict of lists to a dict of lists; it is called with batches of one record.
        worker_init: Called once per worker; what it returns becomes the function's second argument.
        seed: Seed of the run, for the random numbers of each record.
    """

    function: Callable[..., Any] | None
    batched: bool = False
    worker_init: Callable[[], Any] | None = None
    seed: int = 0


class Runner:
    """A worker's copy of the preprocessing."""

    def __init__(self, preprocess: Preprocess, seeding: Seeding, begin_record: Callable[[int], None] | None = None) -> None:
        self._preprocess = preprocess
        self._seeding = seeding
        self._begin_record = begin_record or _ignore
        self._call: Callable[[Record], Any] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Give up a chunk that runs in another thread after its current record: nobody waits for its outcome any more."""
        self._is_stopped = True

    def run(self, chunk: Chunk) -> Outcome:
        """Preprocess records in order until one fails or their samples take too much; what the function raises is part of the outcome."""
        max_bytes = chunk.max_bytes
        if self._preprocess.function is None:
            num_done = len(chunk.records) if max_bytes is None else _num_within(chunk.records, max_bytes)
            return Outcome(num_done, None, chunk.records[:num_done], None)
        samples: list[Sample] = []
        counts: list[int] | None = None  # kept from the first record on that does not give exactly one
        num_done = num_bytes = 0
        begin_record, begin, end, epoch = self._begin_record, self._seeding.begin, self._seeding.end, chunk.epoch
        begin_record(0)
        try:
            call = self._call or self._bound()
            for record, record_id in zip(chunk.records, chunk.ids, strict=True):
                if self._is_stopped:
                    break
                begin_record(num_done)
                begin(epoch, record_id)
                try:
                    made = call(record)
                finally:
                    end()
                if made is not None and type(made) is not list:
                    samples.append(made)
                    if counts is not None:
                        counts.append(1)
                else:
                    counts = [1] * num_done if counts is None else counts
                    counts.append(len(made or ()))
                    samples.extend(made or ())
                num_done += 1
                if max_bytes is not None:
                    num_bytes += sample_nbytes(made)
                    if num_bytes > max_bytes:
                        break
        except BaseException as error:  # noqa: BLE001 - a foreign function may raise anything; it is delivered in its place
            return Outcome(num_done, counts, samples, describe_failure(error))
        is_uniform = counts is None or (len(samples) == num_done and counts.count(1) == num_done)
        return Outcome(num_done, None if is_uniform else counts, samples, None)

    def _bound(self) -> Callable[[Record], Any]:
        """Return the function of one record; the worker's own object is made at the first record, where its failure has a place.

        What it draws does not shift the random numbers of that record, and is the same in every worker.
        """
        self._seeding.begin(0, _WORKER_INIT)
        try:
            self._call = _bind(self._preprocess)
        finally:
            self._seeding.end()
        return self._call


def _num_within(records: Sequence[Record], max_bytes: int) -> int:
    """Return how many records it takes to be above `max_bytes`, or all."""
    num_bytes = 0
    for number, record in enumerate(records, start=1):
        num_bytes += sample_nbytes(record)
        if num_bytes > max_bytes:
            return number
    return len(records)


def _ignore(_index: int) -> None:
    """Note nothing."""


def _bind(preprocess: Preprocess) -> Callable[[Record], Any]:
    function = preprocess.function
    assert function is not None
    call = function if preprocess.worker_init is None else _with_argument(function, preprocess.worker_init())
    return _batch_of_one(call) if preprocess.batched else call


def _with_argument(function: Callable[..., Any], argument: Any) -> Callable[[Record], Any]:
    return lambda record: function(record, argument)


def _batch_of_one(function: Callable[[dict[str, list[Any]]], Any]) -> Callable[[Record], list[Sample]]:
    def call(record: Record) -> list[Sample]:
        if not isinstance(record, Mapping):
            raise TypeError(
                f"preprocess(batched=True): expected records that are mappings, got {type(record).__name__}; use batched=False."
            )
        return list(_rows(function({name: [value] for name, value in record.items()})))

    return call


def _rows(columns: Mapping[str, Sequence[Any]] | None) -> Iterator[dict[str, Any]]:
    """Cut a dict of columns into samples; nothing, no column or empty columns mean that the record is filtered."""
    if not columns:
        return
    if not isinstance(columns, Mapping):
        got = type(columns).__name__
        raise TypeError(f"preprocess(batched=True): expected a dict of columns, got {got}; return one list per field.")
    for name, column in columns.items():
        if isinstance(column, str | bytes) or not hasattr(column, "__len__"):
            raise TypeError(
                f"preprocess(batched=True): expected columns with one value per sample, got a {type(column).__name__} in {name!r}; "
                "put the values of the samples in a list."
            )
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise ValueError(
            f"preprocess(batched=True): expected columns of equal length, got {listed}; return one value per sample in each column."
        )
    names = list(columns)
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def describe_failure(error: BaseException) -> Failure:
    """Return an exception as plain data, without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return Failure(type(error).__qualname__, _message_of(error), text, error, class_names(type(error)))


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a foreign __str__ may raise anything
        return "<str() of it failed>"
