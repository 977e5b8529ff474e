"""Workers that die are replaced, their records run again, nothing is lost, repeated or reordered; poison follows the policy."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioloader import FixedBatch, Loader, Mesh, Pack, PreprocessError, PretrainCollator, Quarantine, Retry, Shuffle, WorkerError
from aioloader.errors import AioLoaderError
from aioloader.state import merge
from tests.contract.cases import THREADS, Options, collate, drain


def document(number: int) -> dict[str, Any]:
    """Work for a fraction of a millisecond; the result depends on the number only."""
    tokens = int(np.random.default_rng(number).integers(5, 200))
    for _ in range(6000):
        pass
    return {"input_ids": np.full(tokens, number % 1000, dtype=np.int64)}


def digest(batch: Any) -> str:
    content = b"".join(tensor.numpy().tobytes() for tensor in batch.values())
    return hashlib.sha256(content + repr(batch.samples).encode()).hexdigest()


def packed(num_records: int, **options: Any) -> Loader:
    return Loader(range(num_records), preprocess=document, batch=Pack(512, rows=4), collate=PretrainCollator(), **options)


class Killer:
    """Sends a signal to a random worker, at random intervals between two of `every_s`."""

    def __init__(self, seed: int, number: signal.Signals, every_s: tuple[float, float]) -> None:
        self._random = random.Random(seed)
        self._number = number
        self._every_s = every_s
        self._next_s = 0.0

    def strike(self, loader: Loader) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._random.uniform(*self._every_s)
            with contextlib.suppress(ProcessLookupError):  # it was just replaced
                os.kill(self._random.choice(loader.stats()["worker_pids"]), self._number)


def chaos(
    num_records: int,
    seed: int,
    number: signal.Signals = signal.SIGKILL,
    *,
    every_s: tuple[float, float] = (0.1, 0.3),
    resume: bool = False,
    **options: Any,
) -> tuple[list[str], int]:
    """Run under a killer and return the digests of all batches and the number of restarts; `resume`: also stop and resume at random."""
    killer, chance = Killer(seed, number, every_s), random.Random(seed)
    digests: list[str] = []
    num_restarts = 0
    state: Any = None
    while True:
        with packed(num_records, workers=4, max_restarts_per_minute=100_000, **options) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            for batch in loader:
                digests.append(digest(batch))
                state = loader.state_dict()
                killer.strike(loader)
                if resume and chance.random() < 0.004:
                    break
            else:
                return digests, num_restarts + loader.stats()["worker_restarts"]
            num_restarts += loader.stats()["worker_restarts"]


def clean(num_records: int) -> list[str]:
    with packed(num_records, workers=0) as loader:
        return [digest(batch) for batch in loader]


@pytest.mark.timeout(90)
def test_a_run_is_exact_while_its_workers_are_being_killed() -> None:
    digests, num_restarts = chaos(6000, seed=1, every_s=(0.03, 0.1))  # a fast machine is done within a second
    assert num_restarts > 3
    assert digests == clean(6000)


@pytest.mark.timeout(90)
def test_a_run_is_exact_while_its_workers_are_being_stopped() -> None:
    digests, num_restarts = chaos(2000, seed=2, number=signal.SIGSTOP, every_s=(0.03, 0.1), timeout_s=0.5)
    assert num_restarts > 0
    assert digests == clean(2000)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("number", "options", "num_records"),
    [
        (signal.SIGKILL, {}, 20_000),
        (signal.SIGKILL, {"resume": True}, 20_000),
        (signal.SIGSTOP, {"timeout_s": 0.5}, 60_000),  # of those that are stopped, few are found and replaced in a second
    ],
    ids=["killed", "killed-and-resumed", "stopped"],
)
def test_chaos(number: signal.Signals, options: dict[str, Any], num_records: int) -> None:
    """The long run: `make chaos`; CHAOS_SEEDS sets the number of seeds."""
    expected = clean(num_records)
    for seed in range(int(os.environ.get("CHAOS_SEEDS", "5"))):
        started = time.monotonic()
        digests, num_restarts = chaos(num_records, seed, number, **options)
        print(f"seed {seed}: {len(digests)} batches, {num_restarts} restarts, {time.monotonic() - started:.0f} s")
        assert digests == expected
        assert num_restarts > 4


def leave(_: int) -> Any:
    os._exit(0)


def dereference_null(_: int) -> Any:
    return ctypes.string_at(0)


def loop(_: int) -> Any:
    while True:
        pass


class Fatal(BaseException):
    pass


def raise_base_exception(_: int) -> Any:
    raise Fatal("as bad as it gets")


def cannot_be_moved(_: int) -> Any:
    return threading.Lock()


def use_up_memory(_: int) -> Any:
    import resource

    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (1 << 28)  # more takes long to fault in
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    hoard = []
    while True:
        hoard.append(bytearray(1 << 24))


POISONS: list[tuple[Callable[[int], Any], type[AioLoaderError]]] = [
    (leave, WorkerError),
    (dereference_null, WorkerError),
    (loop, WorkerError),
    (raise_base_exception, PreprocessError),
    (cannot_be_moved, PreprocessError),
    (use_up_memory, PreprocessError),
]


class Poisoned:
    """Applies a poison to record 15 and passes the others through."""

    def __init__(self, poison: Callable[[int], Any]) -> None:
        self._poison = poison

    def __call__(self, number: int) -> Any:
        return self._poison(number) if number == 15 else number


def retried(num_retries: int, final: Any) -> Any:
    """Return a policy that gives a failing record so many chances more."""
    return Retry(num_retries, backoff_s=0.01, then=final) if num_retries else final


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_retries", [0, 1])
@pytest.mark.parametrize(("poison", "kind"), POISONS, ids=[poison.__name__ for poison, _ in POISONS])
def test_a_poison_record_does_what_the_policy_says(
    poison: Callable[[int], Any], kind: type[AioLoaderError], num_retries: int, tmp_path: Path
) -> None:
    timeout_s = 1.0 if poison is loop else 10.0  # a busy machine takes more than a second to fault in what is asked for
    common: Options = {"preprocess": Poisoned(poison), "batch": FixedBatch(1), "collate": collate, "workers": 2, "timeout_s": timeout_s}
    with Loader(range(40), on_error=retried(num_retries, "raise"), **common) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(15))
    assert isinstance(error, kind)
    assert (error.seq, error.record) == (15, ("sequence", 15))  # type: ignore[attr-defined]

    log = tmp_path / "quarantine.jsonl"
    with Loader(range(40), on_error=retried(num_retries, Quarantine(log=str(log))), **common) as loader:
        delivered, error = drain(loader)
        counts = loader.stats()["records"]
        state = loader.state_dict()
    assert error is None
    assert delivered == [number for number in range(40) if number != 15]
    assert (counts["quarantined_records"], counts["delivered_samples"], counts["records"]) == (1, 39, 40)
    assert state["lanes"]["0"]["quarantined"] == [["sequence", 15]]
    assert [json.loads(line)["record"] for line in log.read_text().splitlines()] == [["sequence", 15]]


class LeavesAtEachRun:
    """Ends its worker at record 15 and passes the others through; counts the runs of that record in a file, for all processes."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs

    def __call__(self, number: int) -> int:
        if number == 15:
            with self._runs.open("ab") as file:
                file.write(b".")
            os._exit(0)
        return number


@pytest.mark.parametrize(
    ("on_error", "num_runs", "is_left_out"),
    [
        ("raise", 3, False),
        (Quarantine(), 3, True),
        ({WorkerError: Quarantine()}, 3, True),
        ({OSError: Quarantine()}, 3, False),
        (Retry(2, backoff_s=0.01), 5, False),
        (Retry(2, backoff_s=0.01, then=Quarantine()), 5, True),
    ],
    ids=["raise", "quarantine", "quarantine-workers", "quarantine-others", "retry", "retry-quarantine"],
)
def test_a_record_that_ends_its_worker_three_times_is_poison(on_error: Any, num_runs: int, is_left_out: bool, tmp_path: Path) -> None:
    """The deaths that show a record to be poison are one failure of it; each retry is one run more."""
    runs = tmp_path / "runs"
    with Loader(range(40), preprocess=LeavesAtEachRun(runs), batch=FixedBatch(1), collate=collate, workers=2, on_error=on_error) as loader:
        delivered, error = drain(loader)
    assert runs.stat().st_size == num_runs
    if is_left_out:
        assert (delivered, error) == ([number for number in range(40) if number != 15], None)
    else:
        assert delivered == list(range(15))
        assert isinstance(error, WorkerError)
        assert (error.seq, error.record) == (15, ("sequence", 15))


def test_more_deaths_than_the_budget_allows_are_an_error() -> None:
    with Loader(
        range(40), preprocess=Poisoned(leave), batch=FixedBatch(1), collate=collate, workers=2, max_restarts_per_minute=1
    ) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(len(delivered)))
    assert isinstance(error, WorkerError)
    assert "expected at most 1 such deaths within a minute" in str(error)


class FailsAtFirst:
    """Raises `OSError` on every fifth record until it was called `num_failures` times with it; counts in files, for all processes."""

    def __init__(self, folder: Path, num_failures: int) -> None:
        self._folder = folder
        self._num_failures = num_failures

    def __call__(self, number: int) -> int:
        if number % 5 == 3:
            attempts = self._folder / str(number)
            with attempts.open("ab") as file:
                file.write(b".")
            if attempts.stat().st_size <= self._num_failures:
                raise OSError(f"attempt {attempts.stat().st_size} of {number}")
        return number


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}, THREADS])
def test_retry_runs_a_record_again(options: Options, tmp_path: Path) -> None:
    function = FailsAtFirst(tmp_path, num_failures=2)
    retry = Retry(2, backoff_s=0.001)
    with Loader(range(20), preprocess=function, batch=FixedBatch(1), collate=collate, on_error={OSError: retry}, **options) as loader:
        delivered, error = drain(loader)
    assert (delivered, error) == (list(range(20)), None)
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {"3": 3, "8": 3, "13": 3, "18": 3}


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}, THREADS])
def test_retry_that_is_used_up_raises_or_quarantines(options: Options, tmp_path: Path) -> None:
    common: Options = {"preprocess": FailsAtFirst(tmp_path, num_failures=9), "batch": FixedBatch(1), "collate": collate, **options}
    with Loader(range(20), on_error=Retry(1, backoff_s=0), **common) as loader:
        delivered, error = drain(loader)
    assert delivered == [0, 1, 2]
    assert isinstance(error, PreprocessError)
    assert isinstance(error.__cause__, OSError)
    with Loader(range(20), on_error=Retry(1, backoff_s=0, then=Quarantine()), **common) as loader:
        delivered, error = drain(loader)
    assert (delivered, error) == ([number for number in range(20) if number % 5 != 3], None)


def fail_every_fifth(number: int) -> int:
    if number % 5 == 3:
        raise ValueError(f"bad {number}")
    return number


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}, THREADS])
def test_a_quarantine_has_a_budget_and_keeps_the_place(options: Options) -> None:
    common: Options = {"preprocess": fail_every_fifth, "batch": FixedBatch(1), "collate": collate, **options}
    with Loader(range(40), on_error=Quarantine(max_records=2), **common) as loader:
        delivered, error = drain(loader)
    assert delivered == [number for number in range(13) if number % 5 != 3]
    assert isinstance(error, PreprocessError)
    assert error.seq == 13
    assert any("one more than it allows" in note for note in error.__notes__)
    with Loader(range(400), on_error=Quarantine(max_fraction=0.1), **common) as loader:
        delivered, error = drain(loader)
    assert isinstance(error, PreprocessError)
    assert error.seq == 103, "a share is judged from 100 records on"


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}, THREADS])
def test_a_budget_that_is_used_up_blames_the_stage_that_failed_and_no_other(options: Options) -> None:
    """K51: it says how many failures it was and where."""

    def always(number: int) -> int:
        raise ValueError(f"bad {number}")

    with Loader(
        range(12), preprocess=always, batch=FixedBatch(1), collate=collate, on_error=Quarantine(max_records=3), **options
    ) as loader:
        delivered, error = drain(loader)
    assert delivered == []
    assert type(error) is PreprocessError
    assert (error.stage, error.seq) == ("preprocess", 3)
    (note,) = error.__notes__
    assert "max_records=3" in note
    assert "one more than it allows, of 4 read" in note
    assert not [stage for stage in ("source", "collate", "worker") if f"stage {stage}" in str(error)]


def test_other_exceptions_are_raised() -> None:
    with Loader(
        range(40), preprocess=fail_every_fifth, batch=FixedBatch(1), collate=collate, workers=0, on_error={OSError: Quarantine()}
    ) as loader:
        delivered, error = drain(loader)
    assert delivered == [0, 1, 2]
    assert isinstance(error, PreprocessError)


class CountsCalls:
    """Fails on every fifth record and notes each call in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, number: int) -> int:
        with self._path.open("a") as file:
            file.write(f"{number}\n")
        return fail_every_fifth(number)


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}])
def test_quarantined_records_are_skipped_by_every_resume_and_epoch_without_running_them(options: Options, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    common: Options = {
        "preprocess": CountsCalls(calls),
        "batch": FixedBatch(2),
        "collate": collate,
        "on_error": Quarantine(),
        "epochs": 2,
        **options,
    }
    expected = [number for number in range(20) if number % 5 != 3]
    with Loader(range(20), **common) as loader:
        iterator = iter(loader)
        for _ in range(8):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    assert (
        state["lanes"]["0"]["quarantined"] == [["sequence", number] for number in (3, 8, 13, 18)][: len(state["lanes"]["0"]["quarantined"])]
    )
    with Loader(range(20), **common) as loader:
        for _ in loader:
            pass
        state = json.loads(json.dumps(loader.state_dict()))
        assert loader.stats()["records"]["quarantined_records"] == 8
    calls.write_text("")
    with Loader(range(20), **common) as loader:
        loader.load_state_dict(state)
        delivered, error = drain(loader)
    assert (delivered, error) == (expected * 2, None)
    assert sorted({int(line) for line in calls.read_text().split()}) == expected


def test_a_rank_resumed_from_the_states_of_all_leaves_out_what_failed_on_any(tmp_path: Path) -> None:
    """Each of two ranks, which do not talk to each other, gets other records in the second epoch."""
    calls = tmp_path / "calls"

    def rank(number: int) -> Loader:
        options: Options = {"preprocess": CountsCalls(calls), "collate": collate, "on_error": Quarantine(), "workers": 0}
        return Loader(range(40), batch=FixedBatch(1), mesh=Mesh(dp_rank=number, dp_size=2), shuffle=Shuffle(window=64), **options)

    states = []
    for number in range(2):
        with rank(number) as loader:
            for _ in itertools.islice(loader, 12):
                pass
            states.append(loader.state_dict())
    known = [{row for _, row in lane["quarantined"]} for state in states for lane in state["lanes"].values()]
    assert all(known)
    state = json.loads(json.dumps(merge(states)))
    for number in range(2):
        calls.write_text("")
        with rank(number) as loader:
            loader.load_state_dict(state)
            rows = [sample.row for _ in range(2) for batch in loader for sample in batch.samples]
        ran = {int(line) for line in calls.read_text().split()}
        assert not ran & (known[0] | known[1])
        assert set(rows) <= ran


def test_worker_deaths_are_said_in_one_line_and_counted(capfd: pytest.CaptureFixture[str]) -> None:
    with Loader(range(3000), preprocess=fail_never, batch=FixedBatch(10), collate=collate, workers=2, buffer_size=40) as loader:
        delivered: list[int] = []
        for batch in loader:
            delivered += batch["x"].tolist()
            if batch.step == 10:
                os.kill(loader.stats()["worker_pids"][0], signal.SIGKILL)
        assert loader.stats()["worker_restarts"] == 1
    assert delivered == list(range(3000))
    assert capfd.readouterr().err.count("was killed by SIGKILL") == 1


def fail_never(number: int) -> int:
    time.sleep(0.0002)
    return number
