"""A worker process: receives chunks over its wire, runs them, answers with blocks. The engine's side is `processes.py`.

Small blocks travel in the message. Larger ones are written once into a segment of shared memory that this worker owns and
reuses when the engine has returned it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from aioloader.pools.chunk import Chunk, Failure, Outcome, Room
from aioloader.pools.progress import ProgressPage
from aioloader.pools.rng import LazySeeding
from aioloader.pools.runner import Preprocess, Runner, describe_failure
from aioloader.pools.transport import Encoded, decode, encode, encode_samples, write
from aioloader.protocols import RecordId
from aioloader.runtime.moving import dumps
from aioloader.runtime.segments import Arena, SegmentViews
from aioloader.runtime.wire import Frame, Wire, WireClosedError

__all__ = ["BLOCK", "CHUNK", "INLINE_BYTES", "REVOKED", "Prepared", "main", "pack"]

CHUNK = 1  # from the engine; brings along which segments are free again
BLOCK = 11  # from the worker
REVOKED = -1  # in place of the number of records done: the chunk was taken back and not run

INLINE_BYTES = 1 << 16  # below this a copy through the socket is cheaper than a segment's bookkeeping


class Prepared(NamedTuple):
    """What a worker begins with; made in the zygote, before the fork."""

    preprocess: Preprocess
    seeding: LazySeeding


def pack(preprocess: bytes) -> bytes:
    """Return what the zygote is to unpickle for workers: it wraps the random generators, then loads `preprocess`.

    What the user's modules import by name from `random` or `numpy.random` is then wrapped too.
    """
    return pickle.dumps(_Unpacking(preprocess))


class _Unpacking:
    def __init__(self, preprocess: bytes) -> None:
        self._preprocess = preprocess

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._preprocess,)


def _unpack(preprocess: bytes) -> Prepared:
    global _seeding
    if _seeding is None:
        _seeding = LazySeeding(0)
        _seeding.install()
    prepared: Preprocess = pickle.loads(preprocess)
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # NumPy does at its first use: in each worker, during its first record
    _seeding.use(prepared.seed)
    return Prepared(prepared, _seeding)


_seeding: LazySeeding | None = None
"""One for each process: modules that were imported once keep what they took from it."""


def main(payload: bytes, descriptors: Sequence[int], prepared: Prepared) -> None:
    """Entry of a worker process.

    `payload` says how much free memory to keep and on which CPU to stay, `descriptors` are its socket, progress page and stack
    file, `prepared` was unpickled by the zygote.
    """
    progress = ProgressPage(descriptors[1])
    faulthandler.register(signal.SIGUSR1, file=descriptors[2], all_threads=True)  # how the engine asks where this worker stands
    max_free_bytes, cpu = pickle.loads(payload)
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    with contextlib.closing(Wire(socket.socket(fileno=descriptors[0]))) as wire:
        _Worker(wire, Runner(*prepared, progress.marker()), progress, Arena(max_free_bytes)).serve()


class _Job(NamedTuple):
    """A chunk as it came, not decoded yet."""

    number: int
    epoch: int
    ids: Sequence[RecordId]
    sizes: Sequence[int]
    body: memoryview
    target: tuple[int, dict[str, Room], int] | None
    """The number of a segment of the engine, where the samples go in it, and how many it is for."""
    max_bytes: int | None


class _Worker:
    def __init__(self, wire: Wire, runner: Runner, progress: ProgressPage, arena: Arena) -> None:
        self._wire = wire
        self._runner = runner
        self._progress = progress
        self._arena = arena
        self._targets = SegmentViews()
        self._queued: deque[_Job] = deque()

    def serve(self) -> None:
        try:
            while True:
                if not self._queued:
                    self._take(self._wire.receive())
                while self._queued:
                    self._answer(self._queued.popleft())
        except WireClosedError:
            self._arena.close()

    def _take(self, frame: Frame | None) -> None:
        if frame is None:
            return
        assert frame.kind == CHUNK
        number, epoch, ids, sizes, max_bytes, returned, retired, target = pickle.loads(frame.meta)
        for segment in returned:
            self._arena.give_back(segment)
        for segment in retired:
            self._targets.forget(segment)
        if target is not None:
            segment, nbytes, rooms, num_rows = target
            if frame.descriptors:
                self._targets.attach(segment, frame.descriptors[0], nbytes)
            target = (segment, rooms, num_rows)
        self._queued.append(_Job(number, epoch, ids, sizes, frame.body, target, max_bytes))

    def _answer(self, job: _Job) -> None:
        if not self._progress.begin_chunk(job.number):
            self._wire.send(BLOCK, _meta((job.number, REVOKED, None, None, 0.0, (), None, 0, [])))
            self._progress.end_chunk()
            return
        started = time.perf_counter()
        outcome = self._run(job)
        service_s = time.perf_counter() - started
        rooms = None if job.target is None or job.target[2] != len(outcome.samples) else job.target[1]
        outcome, encoded = _encode(outcome, rooms)
        elsewhere = self._targets.memory(job.target[0]) if encoded.placed and job.target is not None else None
        self._send(job.number, outcome, encoded, service_s, elsewhere)
        self._progress.end_chunk()

    def _run(self, job: _Job) -> Outcome:
        try:
            records = decode(job.sizes, job.body)
        except BaseException as error:  # noqa: BLE001 - a foreign __setstate__ may raise anything
            return Outcome(0, [], [], describe_failure(error))
        return self._runner.run(Chunk(job.epoch, records, job.ids, max_bytes=job.max_bytes))

    def _send(self, number: int, outcome: Outcome, encoded: Encoded, service_s: float, elsewhere: memoryview | None) -> None:
        counts, failure = outcome.counts, outcome.failure
        if encoded.nbytes <= INLINE_BYTES:
            memory = memoryview(bytearray(encoded.nbytes))
            write(encoded, memory, elsewhere)
            meta = _meta(
                (number, outcome.num_done, counts, failure, service_s, encoded.sizes, None, encoded.placed_nbytes, self._retired())
            )
            self._wire.send(BLOCK, meta, [memory])
            return
        while (waiting := self._wire.try_receive()) is not None:  # returned segments come with the queued chunk
            self._take(waiting)
        segment = self._arena.take(encoded.nbytes)
        write(encoded, segment.memory, elsewhere)
        descriptors = [] if segment.announced else [segment.descriptor]
        where = (segment.number, segment.nbytes, encoded.nbytes)
        facts = (number, outcome.num_done, counts, failure, service_s, encoded.sizes, where, encoded.placed_nbytes, self._retired())
        meta = _meta(facts)
        self._wire.send(BLOCK, meta, descriptors=descriptors)
        segment.announce()

    def _retired(self) -> list[int]:
        retired, self._arena.retired = self._arena.retired, []
        return retired


def _meta(facts: tuple[Any, ...]) -> bytes:
    """Return the facts pickled; only an exception of the user's main module needs the slower way."""
    try:
        return pickle.dumps(facts)
    except Exception:  # noqa: BLE001 - pickling fails in many ways; the failure among the facts was tried before
        return dumps(facts)


def _encode(outcome: Outcome, rooms: dict[str, Room] | None) -> tuple[Outcome, Encoded]:
    """Encode the samples and make the failure movable. A sample that cannot be moved fails its record, in its place."""
    try:
        return outcome._replace(failure=_movable(outcome.failure)), encode_samples(outcome.samples, rooms)
    except BaseException:  # noqa: BLE001 - found below, record by record
        pass
    samples = list(outcome.samples)
    counts = [1] * outcome.num_done if outcome.counts is None else list(outcome.counts)
    kept, at = 0, 0
    for count in counts:
        try:
            encode(samples[at : at + count])
        except BaseException as error:  # noqa: BLE001 - a foreign __reduce__ may raise anything
            failure = _movable(describe_failure(error))
            cut = Outcome(kept, counts[:kept], samples[:at], failure)
            return cut, encode_samples(cut.samples)
        kept, at = kept + 1, at + count
    raise RuntimeError("samples could not be encoded together but could one by one")


def _movable(failure: Failure | None) -> Failure | None:
    """Drop the exception object if it does not survive pickling; its text is kept in any case."""
    if failure is None or failure.error is None:
        return failure
    try:
        copy = pickle.loads(dumps(failure.error))
        survives = type(copy) is type(failure.error) and str(copy) == str(failure.error)
    except BaseException:  # noqa: BLE001 - exceptions with several required arguments fail in many ways
        survives = False
    return failure if survives else failure._replace(error=None)
