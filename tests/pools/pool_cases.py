"""Running a pool of either kind for the length of a test, and functions for its workers to run."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import anyio
import numpy as np

from aioloader.pools.chunk import Chunk, Outcome
from aioloader.pools.processes import ProcessPool
from aioloader.pools.recovery import RecoveryOptions
from aioloader.pools.rng import record_rng
from aioloader.pools.runner import Preprocess
from aioloader.pools.threads import ThreadPool
from aioloader.protocols import RecordId
from aioloader.runtime.moving import dumps
from aioloader.runtime.spawn import ForkClient, ZygoteProcess

T = TypeVar("T")
Pool = ProcessPool | ThreadPool
KINDS = ("process", "thread")


def chunk_of(records: Sequence[Any], *, epoch: int = 0, first: int = 0) -> Chunk:
    ids: list[RecordId] = [("shard", first + row) for row in range(len(records))]
    return Chunk(epoch, records, ids)


async def in_pool(
    kind: str,
    zygote: ZygoteProcess,
    preprocess: Preprocess | bytes,
    body: Callable[[Pool], Awaitable[T]],
    *,
    num_workers: int = 2,
    wait: bool = True,
    recovery: RecoveryOptions | None = None,
) -> T:
    """Start a pool, await `body(pool)`, and close the pool as an engine does: while its tasks are being cancelled."""
    data = preprocess if isinstance(preprocess, bytes) else dumps(preprocess)
    forks = ForkClient(zygote.connect())
    recovery = recovery or RecoveryOptions()
    pool: Pool = ThreadPool(num_workers, data) if kind == "thread" else ProcessPool(forks, num_workers, data, recovery)
    results: list[T] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(forks.run)
        if wait:
            await pool.start(tasks)
        else:
            tasks.start_soon(pool.start, tasks)
        try:
            results.append(await body(pool))
        finally:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await pool.aclose()
                forks.close()
    return results[0]


async def outcomes(pool: Pool, chunks: Sequence[Chunk]) -> list[Outcome]:
    """Run chunks at once, however many; return their outcomes in the order of the chunks."""
    results: dict[int, Outcome] = {}

    async def run(number: int, chunk: Chunk) -> None:
        results[number] = (await pool.run(chunk)).outcome

    async with anyio.create_task_group() as tasks:
        for number, chunk in enumerate(chunks):
            tasks.start_soon(run, number, chunk)
    return [results[number] for number in range(len(chunks))]


# What workers run


def double(record: int) -> int:
    return record * 2


def repeat(record: int) -> list[str]:
    """Return no, one or several samples."""
    return [f"{record}.{number}" for number in range(record % 3)]


def keep_even(record: int) -> int | None:
    return None if record % 2 else record


def draw(record: int) -> tuple[Any, ...]:
    return record, record_rng().integers(1 << 40)


def draw_globally(record: int) -> tuple[Any, ...]:
    return record, random.random(), random.randint(0, 1 << 40), float(np.random.rand()), int(np.random.randint(1 << 30))


def fail_at(record: int) -> int:
    if record == 3:
        raise LookupError(f"record {record} is bad")
    return record


class Odd(BaseException):
    pass


ERRORS: dict[str, BaseException] = {
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "generator": GeneratorExit(),
    "stop": StopIteration(4),
    "own": Odd("odd"),
}


def raise_named(name: str) -> str:
    if name in ERRORS:
        raise ERRORS[name]
    return name


class StubbornError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail_stubbornly(_record: int) -> NoReturn:
    raise StubbornError(1, 2)


def columns(rows: dict[str, list[int]]) -> dict[str, list[int]]:
    (number,) = rows["number"]
    return {"number": [number] * number, "place": list(range(number))}


class Counter:
    """What a worker has for itself."""

    def __init__(self) -> None:
        self.place = (os.getpid(), threading.get_ident())
        self.count = 0


def count(record: int, counter: Counter) -> tuple[int, tuple[int, int], int]:
    assert counter.place == (os.getpid(), threading.get_ident())
    counter.count += 1
    return record, counter.place, counter.count


def fail_to_start() -> NoReturn:
    raise OSError("no model here")


def ignore(record: int, _object: Any) -> int:
    return record


def with_own(_record: int, own: int) -> int:
    return own


def die(record: str) -> str:
    if record.startswith("exit "):
        os._exit(int(record.removeprefix("exit ")))
    if record.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, record))
    return record


def large(record: int) -> dict[str, Any]:
    return {"pixels": np.full((300, 300), record % 256, np.uint8), "record": record}


def passed_on(record: Any) -> Any:
    return record


def has_torch(_record: int) -> bool:
    return "torch" in sys.modules


def process_facts(_record: int) -> tuple[int, str, int]:
    with open("/proc/self/comm") as file:
        return os.getpid(), file.read().strip(), threading.active_count()


def page_faults_of_large_buffers(num_rounds: int) -> int:
    """Return how many pages were faulted in by making and dropping 32 MiB so many times, after the first."""
    before = 0
    for number in range(1 + num_rounds):
        if number == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        buffers = [np.ones(1 << 20) for _ in range(4)]
        del buffers
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


class Meeting:
    """What a worker has for itself, which takes until so many workers are making theirs."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        self._folder = folder
        self._num_workers = num_workers

    def __call__(self) -> int:
        (self._folder / str(os.getpid())).touch()
        while len(list(self._folder.iterdir())) < self._num_workers:
            time.sleep(0.001)
        return os.getpid()


class Unsendable:
    """Can be made in a worker and cannot leave it."""

    def __reduce__(self) -> NoReturn:
        raise OSError("stays here")


def unsendable_at_three(record: int) -> Any:
    return Unsendable() if record == 3 else record


class Poisoned:
    """Leaves a worker and cannot be loaded anywhere else."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _raise, (self.error,)


def _raise(error: Exception) -> NoReturn:
    raise error


def poisoned(_record: int) -> Poisoned:
    return Poisoned(ValueError("bad bytes"))


def block_on(path: str) -> str:
    """Wait until somebody writes to a named pipe."""
    with open(path) as file:
        return file.read()


def block_on_first(record: tuple[str, bytes]) -> str:
    return block_on(record[0])


def die_or_block(record: str) -> str:
    return block_on(record.removeprefix("block ")) if record.startswith("block ") else die(record)


def die_once(path: str) -> str:
    """Die at the first call for a path; the second finds what the first left."""
    if path.startswith("/"):
        try:
            with open(path, "x"):
                os._exit(3)
        except FileExistsError:
            return "survived"
    return path
