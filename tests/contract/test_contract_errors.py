"""Errors keep their place: everything before is delivered, then the error is raised, and never a silent end."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioloader import (
    AioLoaderError,
    BatchError,
    FixedBatch,
    HostError,
    Loader,
    Pack,
    PreprocessError,
    PretrainCollator,
    SourceError,
    WorkerError,
)
from tests.contract.cases import (
    BAD,
    EVERY_HOST,
    INLINE,
    PROCESSES,
    SIDECAR_THREADS,
    THREAD_HOST,
    THREADS,
    Options,
    bad_at_15,
    collate,
    drain,
    name_of,
    numbers,
    wait_until_dead,
)

SMALL: Options = {"batch": FixedBatch(1), "collate": collate}


class RequiredKeywordsError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, *, code: int, reason: str) -> None:
        self.code = code
        super().__init__(f"code {code}: {reason}")


class QuietBaseError(BaseException):
    """Not an Exception."""


def check_error(error: AioLoaderError | None, *, worker: str) -> None:
    assert type(error) is PreprocessError
    assert (error.seq, error.record, error.lane) == (BAD, ("sequence", BAD), 0)
    assert worker in str(error.worker)
    assert "ValueError: record 15 is bad" in str(error)
    assert 'raise ValueError(f"record {number} is bad")' in str(error)
    assert type(error.__cause__) is ValueError
    assert str(error.__cause__) == "record 15 is bad"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("options", "times", "delay_s", "worker"),
    [
        (THREADS, 47, 0.0, "thread"),
        (THREADS, 25, 0.002, "thread"),
        (THREADS, 2, 0.05, "thread"),
        (INLINE, 10, 0.0, "inline"),
        (THREAD_HOST, 5, 0.0, "pid"),
        (THREAD_HOST, 2, 0.002, "pid"),
        (SIDECAR_THREADS, 3, 0.0, "thread"),
        (PROCESSES, 3, 0.0, "pid"),
        (PROCESSES, 2, 0.002, "pid"),
        (PROCESSES, 1, 0.05, "pid"),
    ],
)
def test_100_of_100_runs_stop_at_the_bad_record(options: Options, times: int, delay_s: float, worker: str) -> None:
    """The cases make 100 runs; a loader begins anew after each."""
    with Loader(range(60), preprocess=bad_at_15, **SMALL, **options) as loader:
        for _ in range(times):
            delivered, error = drain(loader, delay_s)
            assert delivered == list(range(BAD))
            check_error(error, worker=worker)


class Upstream:
    """Fails after some records, with whatever it is given."""

    def __init__(self, num_records: int, failure: BaseException) -> None:
        self.num_records = num_records
        self.failure = failure

    def __iter__(self) -> Iterator[int]:
        yield from range(self.num_records)
        raise self.failure


class AsyncUpstream(Upstream):
    """The same, asynchronous."""

    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(self.num_records):
            yield number
        raise self.failure


@pytest.mark.parametrize("make", [Upstream, AsyncUpstream])
@pytest.mark.parametrize("options", EVERY_HOST.values(), ids=EVERY_HOST)
def test_an_upstream_that_fails(options: Options, make: Callable[[int, BaseException], Any]) -> None:
    with Loader(make(20, OSError(5, "disk gone")), batch=FixedBatch(3), collate=collate, **options) as loader:
        delivered, error = drain(loader, 0.002)
    assert delivered == list(range(20)), "the last batch is not full, and everything before the failure is delivered"
    assert type(error) is SourceError
    assert error.record is not None
    assert error.record[1] == 20
    assert type(error.__cause__) is OSError
    assert error.__cause__.errno == 5
    assert "disk gone" in str(error)


@pytest.mark.parametrize("failure", [SystemExit(3), QuietBaseError("quiet"), GeneratorExit(), StopAsyncIteration("odd")], ids=repr)
@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
def test_an_upstream_that_fails_with_something_odd(options: Options, failure: BaseException) -> None:
    with Loader(Upstream(20, failure), **SMALL, **options) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(20))
    assert type(error) is SourceError
    assert type(failure).__name__ in str(error)


def test_an_upstream_that_exits_does_not_end_the_sidecar() -> None:
    with Loader(Upstream(20, SystemExit(3)), **SMALL, **SIDECAR_THREADS) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(20))
    assert type(error) is SourceError


def test_an_upstream_that_fails_while_nobody_listens() -> None:
    """K42."""
    with Loader(Upstream(3, RuntimeError("K42")), **SMALL, buffer_size=1, prefetch_batches=1, **THREADS) as loader:
        delivered, error = drain(loader, 0.05)
    assert delivered == [0, 1, 2]
    assert type(error) is SourceError
    assert "K42" in str(error)


def raise_keywords(number: int) -> int:
    if number == 3:
        raise RequiredKeywordsError(code=7, reason="first line\nsecond line")
    return number


def raise_key_error(number: int) -> int:
    if number == 3:
        raise KeyError("first line\nsecond line")
    return number


def raise_called_process_error(number: int) -> int:
    if number == 3:
        raise subprocess.CalledProcessError(9, ["tool", "--flag"], output="out", stderr="err")
    return number


def raise_base(number: int) -> int:
    if number == 3:
        raise QuietBaseError("quiet")
    return number


def raise_exit(number: int) -> int:
    if number == 3:
        raise SystemExit(0)
    return number


def raise_generator_exit(number: int) -> int:
    if number == 3:
        raise GeneratorExit
    return number


def raise_stop_iteration(number: int) -> int:
    if number == 3:
        raise StopIteration(5)
    return number


def raise_a_chain(number: int) -> int:
    if number == 3:
        try:
            raise KeyError("the reason")
        except KeyError as error:
            raise RuntimeError("the consequence") from error
    return number


def raise_at_great_length(number: int) -> int:
    if number == 3:
        raise ValueError("x" * 3_000_000)
    return number


class UnreadableError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_unreadable(number: int) -> int:
    if number == 3:
        raise UnreadableError
    return number


ODD_FUNCTIONS: list[tuple[Callable[[int], int], list[str]]] = [
    (raise_keywords, ["RequiredKeywordsError", "code 7: first line\nsecond line"]),
    (raise_key_error, ["KeyError", "raise KeyError"]),
    (raise_called_process_error, ["CalledProcessError", "returned non-zero exit status 9"]),
    (raise_base, ["QuietBaseError", "quiet"]),
    (raise_exit, ["SystemExit"]),
    (raise_generator_exit, ["GeneratorExit"]),
    (raise_stop_iteration, ["StopIteration"]),
    (raise_a_chain, ["RuntimeError: the consequence", "KeyError: 'the reason'", "direct cause"]),
    (raise_at_great_length, ["ValueError: xxxx"]),
    (raise_unreadable, ["UnreadableError"]),
]


@pytest.mark.parametrize("options", [INLINE, THREADS, THREAD_HOST], ids=name_of)
@pytest.mark.parametrize(("function", "texts"), ODD_FUNCTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_odd_exceptions_come_through(function: Callable[[int], int], texts: list[str], options: Options) -> None:
    """K49."""
    with Loader(range(9), preprocess=function, **SMALL, **options) as loader:
        delivered, error = drain(loader)
    assert delivered == [0, 1, 2]
    assert type(error) is PreprocessError
    assert error.record == ("sequence", 3)
    for text in [*texts, function.__name__]:
        assert text in str(error)


def test_an_odd_exception_comes_through_from_two_processes_away() -> None:
    with Loader(range(9), preprocess=raise_keywords, **SMALL, **PROCESSES) as loader:
        delivered, error = drain(loader)
    assert delivered == [0, 1, 2]
    assert type(error) is PreprocessError
    assert "RequiredKeywordsError: code 7: first line\nsecond line" in str(error)


@pytest.mark.parametrize("options", EVERY_HOST.values(), ids=EVERY_HOST)
def test_an_error_is_raised_again(options: Options) -> None:
    """K50: it never becomes a normal end."""
    with Loader(range(20), preprocess=lambda number: 1 // (number - 7), **SMALL, **options) as loader:
        iterator = iter(loader)
        assert len([next(iterator) for _ in range(7)]) == 7
        for _ in range(3):
            with pytest.raises(PreprocessError, match="ZeroDivisionError") as caught:
                next(iterator)
            assert caught.value.record == ("sequence", 7)


class LoadsBadly:
    """Can be pickled, cannot be loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_refuse, ())


def _refuse() -> None:
    raise RuntimeError("loads badly")


@pytest.mark.parametrize("options", [THREAD_HOST, PROCESSES], ids=name_of)
def test_samples_that_cannot_be_moved(options: Options) -> None:
    def sample(number: int) -> Any:
        return threading.Lock() if number == 5 else number

    def badly(number: int) -> Any:
        return LoadsBadly() if number == 5 else number

    with Loader(range(9), preprocess=sample, **SMALL, **options) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(5))
    assert type(error) is PreprocessError
    assert error.record == ("sequence", 5)
    assert "lock" in str(error)

    with Loader(range(9), preprocess=badly, **SMALL, **options) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(len(delivered))), "all of a block is lost, and nothing out of order"
    assert len(delivered) <= 5
    assert type(error) is PreprocessError
    assert "loads badly" in str(error)


def test_records_that_cannot_be_moved() -> None:
    records = [0, 1, 2, threading.Lock(), 4]
    with Loader(records, preprocess=lambda record: record, **SMALL, **THREAD_HOST) as loader:
        delivered, error = drain(loader)
    assert delivered == [0, 1, 2]
    assert type(error) is PreprocessError
    assert error.record == ("sequence", 3)
    assert "lock" in str(error)


class Collate:
    """Fails in the micro-batch that holds 6."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, samples: list[int]) -> Any:
        if 6 not in samples:
            return collate(samples)
        match self.what:
            case "raises":
                raise ValueError("cannot collate")
            case "exits":
                raise SystemExit(1)
            case "no dict":
                return samples
            case "lock":
                return {"x": threading.Lock()}
            case "loads badly":
                return {"x": LoadsBadly()}
            case _:
                raise AssertionError(self.what)


@pytest.mark.parametrize("options", [INLINE, THREADS, SIDECAR_THREADS], ids=name_of)
@pytest.mark.parametrize(
    ("what", "text"), [("raises", "ValueError: cannot collate"), ("exits", "SystemExit: 1"), ("no dict", "expected a dict of arrays")]
)
def test_a_collator_that_fails(what: str, text: str, options: Options) -> None:
    with Loader(range(20), batch=FixedBatch(2), collate=Collate(what), **options) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(6))
    assert type(error) is BatchError
    assert (error.seq, error.record, error.lane) == (6, ("sequence", 6), 0)
    assert text in str(error)


@pytest.mark.parametrize("options", [THREADS, SIDECAR_THREADS], ids=name_of)
def test_a_collator_whose_result_cannot_be_moved(options: Options) -> None:
    with Loader(range(20), batch=FixedBatch(2), collate=Collate("lock"), **options) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(6))
    assert type(error) is BatchError
    assert error.record == ("sequence", 6)
    assert "lock" in str(error)


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
def test_a_batching_that_fails(options: Options) -> None:
    samples = [{"input_ids": [1] * (9 if number == 7 else 4)} for number in range(12)]
    with Loader(samples, batch=Pack(8, overflow="error"), collate=PretrainCollator(), **options) as loader:
        rows, error = drain(loader, of=lambda batch: [sample.row for sample in batch.samples])
    assert rows == list(range(7))
    assert type(error) is BatchError
    assert error.record == ("sequence", 7)
    assert "Pack: expected at most seq_len=8 tokens, got 9" in str(error)


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
def test_an_error_with_several_lanes(options: Options) -> None:
    with Loader(range(60), preprocess=bad_at_15, lanes=4, batch=FixedBatch(2), collate=collate, **options) as loader:
        delivered, error = drain(loader)
    assert sorted(delivered) == list(range(BAD)), "what comes before the failure in the global order, also of the lanes behind"
    assert type(error) is PreprocessError
    assert (error.record, error.lane, error.seq) == (("sequence", BAD), 3, 3)


def kill_at_40(number: int) -> int:
    if number == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def leave_at_40(number: int) -> int:
    if number == 40:
        os._exit(0)
    return number


@pytest.mark.parametrize(
    ("function", "how", "exitcode"), [(kill_at_40, "was killed by SIGKILL", -9), (leave_at_40, "left with exit code 0", 0)]
)
@pytest.mark.parametrize("options", [THREAD_HOST, PROCESSES], ids=name_of)
def test_a_worker_that_dies_at_a_record(function: Callable[[int], int], how: str, exitcode: int, options: Options) -> None:
    with Loader(range(400), preprocess=function, **SMALL, buffer_size=16, **options) as loader:
        started = time.monotonic()
        delivered, error = drain(loader)
        assert time.monotonic() - started < 10
        assert type(error) is WorkerError
        assert delivered == list(range(error.seqs[0])), "everything before what the dead worker held, also what the other one held"
        assert 40 in error.seqs
        assert error.exitcode == exitcode
        assert how in str(error)
        assert f"worker {error.worker} (pid {error.pid})" in str(error)
        assert f"seq {error.seqs[0]} to {error.seqs[-1]}" in str(error)
        again, error = drain(loader)
        assert type(error) is WorkerError
        assert again == list(range(len(again)))


def slow(number: int) -> int:
    time.sleep(0.002)
    return number


@pytest.mark.parametrize("options", [THREAD_HOST, PROCESSES], ids=name_of)
def test_a_worker_that_is_killed_from_outside(options: Options) -> None:
    """K36."""
    with Loader(range(1_000), preprocess=slow, **SMALL, buffer_size=16, **options) as loader:
        pids: list[int] = []
        killed_at: list[float] = []

        def kill_after_10(batch: Any) -> list[int]:
            if batch.step == 9:
                pids.extend(loader.stats()["worker_pids"])
                os.kill(pids[1], signal.SIGKILL)
                killed_at.append(time.monotonic())
            return numbers([batch])

        delivered, error = drain(loader, of=kill_after_10)
        assert (delivered, error) == (list(range(1_000)), None), "another worker takes over, and its records are run again"
        assert killed_at
        assert loader.stats()["worker_restarts"] == 1
        pids += loader.stats()["worker_pids"]
    assert not wait_until_dead(pids, 5)


def test_a_worker_that_dies_does_not_take_what_others_hold_along() -> None:
    """The other worker is busy with an earlier record when the death becomes known."""

    def first_slow_second_dead(number: int) -> int:
        if number == 0:
            time.sleep(0.7)
        if number == 1:
            os._exit(1)
        return number

    with Loader(range(40), preprocess=first_slow_second_dead, **SMALL, buffer_size=4, **THREAD_HOST) as loader:
        delivered, error = drain(loader)
    assert delivered == [0]
    assert type(error) is WorkerError
    assert error.seqs[0] == 1


def sidecar_of(worker_pid: int) -> int:
    return parent_of(worker_pid, "aioloader-engin")


def zygote_of(worker_pid: int) -> int:
    with open(f"/proc/{worker_pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("victim", [sidecar_of, zygote_of])
def test_a_host_that_is_killed_is_replaced_and_the_pass_goes_on(victim: Callable[[int], int]) -> None:
    pids: list[int] = []
    with Loader(range(600), **SMALL, buffer_size=16, **PROCESSES) as loader:
        delivered: list[int] = []
        for batch in loader:
            delivered += numbers([batch])
            if batch.step in (0, 300):
                pids += loader.stats()["worker_pids"]
                os.kill(victim(pids[-1]), signal.SIGKILL)
        assert delivered == list(range(600))
        assert loader.stats()["host_restarts"] == 2
        assert [batch.epoch for batch in loader] == [1] * 600, "the next pass is the next epoch"
    assert not wait_until_dead(pids, 5)


def test_a_host_that_is_killed_again_and_again_is_an_error() -> None:
    with Loader(range(100_000), **SMALL, buffer_size=16, **PROCESSES) as loader:
        iterator = iter(loader)
        next(iterator)
        for num_restarts in range(1, 4):
            os.kill(sidecar_of(loader.stats()["worker_pids"][0]), signal.SIGKILL)
            while loader.stats()["host_restarts"] < num_restarts:
                next(iterator)
            next(iterator)
        os.kill(sidecar_of(loader.stats()["worker_pids"][0]), signal.SIGKILL)
        with pytest.raises(HostError, match=r"sidecar \(pid \d+\): expected it to run .* was killed by SIGKILL; look for"):
            for _ in iterator:
                pass


def parent_of(worker_pid: int, name: str) -> int:
    """Return the process called `name` among the siblings of a worker: both are children of the zygote."""
    with open(f"/proc/{worker_pid}/stat") as file:
        zygote = file.read().rpartition(")")[2].split()[1]
    with open(f"/proc/{zygote}/task/{zygote}/children") as file:
        children = file.read().split()
    for child in children:
        with open(f"/proc/{child}/comm") as file:
            if file.read().strip() == name:
                return int(child)
    raise AssertionError(f"no child called {name} among {children}")


def test_a_function_that_cannot_be_loaded_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os\nif os.environ['ONLY_HERE'] != 'yes':\n    raise ImportError('only here')\ndef function(x): return x\n"
    (tmp_path / "only_here.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ONLY_HERE", "yes")
    function = importlib.import_module("only_here").function
    monkeypatch.setenv("ONLY_HERE", "no")
    with Loader(range(9), preprocess=function, **SMALL, **THREAD_HOST) as loader:
        delivered, error = drain(loader)
    assert delivered == []
    assert "expected a function that a worker process can load" in str(error)
    assert "ImportError: only here" in str(error)


def test_a_worker_init_that_fails_names_the_first_record() -> None:
    def init() -> Any:
        raise RuntimeError("no model here")

    for options in (INLINE, THREADS, THREAD_HOST):
        with Loader(range(9), preprocess=lambda record, model: record, worker_init=init, **SMALL, **options) as loader:
            delivered, error = drain(loader)
        assert delivered == []
        assert type(error) is PreprocessError
        assert error.record == ("sequence", 0)
        assert "no model here" in str(error)
