"""A pass that does not get on says which stage stands still and where each worker stands, whatever it is that blocks."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from aioloader import FixedBatch, Loader, StallError
from aioloader.engine.watchdog import Facts, Watchdog, describe_stall
from aioloader.protocols import Cursor, Group, Item, Json, Reader
from tests.contract.cases import PROCESSES, SIDECAR_THREADS, Options, collate, drain, name_of

TIMEOUT_S = 0.8
"""What an engine whose workers are threads needs for its start, several times over."""

HANG_S = 1.3
FOR_EVER_S = 60.0


def report_seconds(report: str) -> list[float]:
    """Return for how many seconds nothing had moved, of each report."""
    return [float(seconds) for seconds in re.findall(r"no progress for (\d+\.\d) s", report)]


def stack_of(name: str, report: str) -> str:
    """Return the part of the report that belongs to the threads or workers whose names begin like this, which must be there."""
    stacks = re.findall(rf"^  {name}.*:\n((?:    .*\n?)+)", report, re.MULTILINE)
    assert stacks, report
    return "".join(stacks)


def stand_still_at_20(number: int) -> int:
    while number == 20:
        time.sleep(0.01)
    return number


@pytest.mark.parametrize("options", [PROCESSES, SIDECAR_THREADS], ids=name_of)
def test_a_stalled_worker_is_named_with_its_stack(options: Options) -> None:
    """With room for two records in flight each travels alone, so that none shares the fate of the one that stands still."""
    stall: Options = {"stall_timeout_s": 1.5, "raise_on_stall": True}
    with Loader(range(60), preprocess=stand_still_at_20, batch=FixedBatch(1), collate=collate, buffer_size=2, **stall, **options) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(20))
    assert isinstance(error, StallError)
    assert error.stage == "preprocess"
    assert "stage preprocess does not get on and the trainer waits" in str(error)
    assert "in stand_still_at_20" in str(error)


def stand_still_from_20_on(number: int) -> int:
    while number >= 20:
        time.sleep(0.01)
    return number


def test_two_stalled_workers_are_both_named_each_with_its_stack() -> None:
    stall: Options = {"stall_timeout_s": 1.5, "raise_on_stall": True}
    options: Options = {"preprocess": stand_still_from_20_on, "buffer_size": 2, **stall, **PROCESSES}
    with Loader(range(60), batch=FixedBatch(1), collate=collate, **options) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(20))
    assert isinstance(error, StallError)
    assert error.stage == "preprocess"
    assert "(2 chunks run)" in str(error)
    for number in (0, 1):
        stack = stack_of(rf"worker {number} \(pid \d+\)", str(error))
        (running_s,) = re.findall(r"record 0 of its chunk, for (\d+\.\d) s", stack)
        assert 1.4 <= float(running_s) < 10, "a look may have been before it was known to run"
        assert "in stand_still_from_20_on" in stack


def dries_up() -> Iterator[int]:
    yield 0
    time.sleep(FOR_EVER_S)


class NeverOpens:
    """A source that does not begin."""

    def fingerprint(self) -> Mapping[str, Json]:
        return {}

    def open(self, epoch: int, cursor: Cursor | None) -> Reader:
        time.sleep(FOR_EVER_S)
        raise AssertionError


@pytest.mark.parametrize(("source", "before", "where"), [(dries_up, [0], "in dries_up"), (NeverOpens(), [], "in open")])
def test_a_stalled_source_is_named_with_its_stack(source: Any, before: list[int], where: str, capfd: pytest.CaptureFixture[str]) -> None:
    stall: Options = {"stall_timeout_s": TIMEOUT_S, "raise_on_stall": True}
    with Loader(source, batch=FixedBatch(1), collate=collate, workers=1, pool="thread", **stall) as loader:
        delivered, error = drain(loader)
    assert delivered == before, "what comes before a pause is not held back by it"
    assert isinstance(error, StallError)
    assert error.stage == "source"
    assert where in stack_of("aioloader-source", str(error))
    assert capfd.readouterr().err.count("stage source does not get on") == 1


class HangsAt:
    """A collator that takes `slow_s` each time, and `hang_s` for one number."""

    def __init__(self, number: int, hang_s: float, slow_s: float = 0.0) -> None:
        self.number = number
        self.hang_s = hang_s
        self.slow_s = slow_s

    def __call__(self, samples: list[int]) -> dict[str, Any]:
        time.sleep(self.slow_s)
        if self.number in samples:
            self.hang()
        return collate(samples)

    def hang(self) -> None:
        time.sleep(self.hang_s)


AT = pytest.mark.parametrize(
    ("number", "slow_s", "thread"),
    [(0, 0.0, "aioloader-engine"), (20, 0.0, "aioloader-(?:engine|collate)"), (20, 0.005, "aioloader-collate")],
    ids=["at the first batch", "at a later one", "at a later one in its thread"],
)
"""In which thread the collator hangs: one that was slow the last time, as any may be on a busy machine, runs in its own."""


@AT
@pytest.mark.parametrize("host", ["process", "thread"])
def test_a_collator_that_hangs_ends_the_pass_after_what_was_before(host: str, number: int, slow_s: float, thread: str) -> None:
    """In a thread it goes on at some time: nobody could end it."""
    hangs = HangsAt(number, FOR_EVER_S if host == "process" else 2 * HANG_S, slow_s)
    options: Options = {"workers": 1, "pool": "thread", "host": host, "stall_timeout_s": TIMEOUT_S, "raise_on_stall": True}
    started = time.monotonic()
    with Loader(range(60), batch=FixedBatch(1), collate=hangs, **options) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(number))
    assert isinstance(error, StallError)
    assert error.stage == "collate"
    (stalled_s,) = report_seconds(str(error))
    assert TIMEOUT_S <= stalled_s <= time.monotonic() - started
    assert "in hang" in stack_of(thread, str(error))


class Reports:
    """What was logged, wherever the engine runs: a sidecar's reports go to the standard error of all."""

    def __init__(self, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
        self._capfd = capfd
        self._caplog = caplog

    def text(self) -> str:
        return self._caplog.text + self._capfd.readouterr().err


@pytest.fixture
def reports(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Reports:
    return Reports(capfd, caplog)


@AT
@pytest.mark.parametrize("host", ["process", "thread"])
def test_a_collator_that_hangs_for_a_while_is_reported_and_the_pass_goes_on(
    host: str, number: int, slow_s: float, thread: str, reports: Reports
) -> None:
    options: Options = {"workers": 1, "pool": "thread", "host": host, "stall_timeout_s": TIMEOUT_S}
    with Loader(range(60), batch=FixedBatch(1), collate=HangsAt(number, HANG_S, slow_s), **options) as loader:
        delivered, error = drain(loader)
    assert (delivered, error) == (list(range(60)), None)
    report = reports.text()
    (stalled_s,) = report_seconds(report)
    assert TIMEOUT_S <= stalled_s <= HANG_S + TIMEOUT_S
    assert report.count("stage collate does not get on") == 1
    assert "in hang" in stack_of(thread, report)


# Other code of the user's that the engine's event loop runs


class HangsInPush:
    """Micro-batches of one, whose fifth takes its time to be formed."""

    def start(self) -> Any:
        whole = FixedBatch(1).start()

        def push(item: Item) -> Iterator[Group]:
            if item.seq == 5:
                time.sleep(HANG_S)
            return whole.push(item)

        others = {name: getattr(whole, name) for name in ("ready", "finish", "counters", "state", "refs", "restore")}
        return SimpleNamespace(push=push, **others)

    def fingerprint(self) -> Mapping[str, Json]:
        return {}


class BlocksTheLoop:
    """An asynchronous upstream that does what it must not."""

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(10):
            await asyncio.sleep(0)
            if number == 5:
                time.sleep(HANG_S)  # noqa: ASYNC251 - as users do
            yield number


class SlowToPickle:
    """A value that takes its time to move to another process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        if self.number == 5:
            time.sleep(HANG_S)
        return SlowToPickle, (self.number,)


def slow_to_pickle() -> Iterator[SlowToPickle]:
    return map(SlowToPickle, range(10))


def number_of(record: SlowToPickle) -> int:
    return record.number


def with_slow_to_pickle(samples: list[int]) -> dict[str, Any]:
    return {**collate(samples), "other": SlowToPickle(samples[0])}


@pytest.mark.parametrize(
    ("stage", "where", "options"),
    [
        ("batch", "in push", {"source": range(10), "batch": HangsInPush(), "pool": "thread"}),
        ("source", "in __aiter__", {"source": BlocksTheLoop(), "pool": "thread"}),
        ("bridge", "in __reduce__", {"source": range(10), "collate": with_slow_to_pickle, "pool": "thread"}),
        ("preprocess", "in __reduce__", {"source": slow_to_pickle, "preprocess": number_of, "pool": "process"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_blocks_the_engine_is_reported_with_its_stage(stage: str, where: str, options: Options, reports: Reports) -> None:
    with Loader(**{"batch": FixedBatch(1), "collate": collate, "workers": 1, "stall_timeout_s": TIMEOUT_S, **options}) as loader:
        delivered, error = drain(loader, of=lambda batch: batch["x"].tolist())
    assert (delivered, error) == (list(range(10)), None)
    report = reports.text()
    assert f"stage {stage} does not get on and blocks the engine's event loop" in report
    assert where in stack_of("aioloader-engine", report)


# What is no stall


def test_a_trainer_that_takes_its_time_is_no_stall(reports: Reports) -> None:
    options: Options = {"workers": 1, "pool": "thread", "stall_timeout_s": TIMEOUT_S, "raise_on_stall": True}
    with Loader(range(20), batch=FixedBatch(1), collate=collate, **options) as loader:
        for batch in loader:
            if batch.step == 3:
                time.sleep(2 * TIMEOUT_S)
    assert "no progress" not in reports.text()


def facts(progress: int, *, is_consumer_bound: bool = False, blocked_in: str | None = None) -> Facts:
    return Facts((progress,), is_consumer_bound, is_reading=False, num_running=1, is_collating=False, blocked_in=blocked_in)


def test_the_watchdog_counts_from_the_last_progress() -> None:
    watchdog = Watchdog(10, now_s=0)
    assert watchdog.look(facts(1), 5) is None
    assert watchdog.look(facts(1), 14) is None
    assert watchdog.look(facts(1), 16) == 11
    assert watchdog.look(facts(1), 20) is None, "said once"
    assert watchdog.look(facts(1, is_consumer_bound=True), 30) is None
    assert watchdog.look(facts(1), 39) is None
    assert watchdog.look(facts(2), 41) is None
    assert watchdog.look(facts(2), 51) == 10


def test_a_blocked_loop_is_held_against_the_engine_as_long_as_it_is_blocked() -> None:
    watchdog = Watchdog(10, now_s=0)
    waiting, blocked = facts(1, is_consumer_bound=True), facts(1, is_consumer_bound=True, blocked_in="batch")
    assert watchdog.look(waiting, 1) is None
    assert watchdog.look(blocked, 9) is None
    assert watchdog.look(waiting, 10) is None, "it was not for long"
    assert watchdog.look(blocked, 19) is None
    assert watchdog.look(blocked, 21) == 11
    assert watchdog.look(blocked, 22) is None, "said once"
    assert watchdog.look(replace(blocked, progress=(2,)), 40) is None


@pytest.mark.parametrize(
    ("found", "stage"),
    [
        ({"is_collating": True, "num_running": 2, "is_reading": True}, "collate"),
        ({"num_running": 2, "is_reading": True}, "preprocess"),
        ({"is_reading": True}, "source"),
        ({}, "order"),
        ({"is_collating": True, "num_running": 2, "is_reading": True, "blocked_in": "bridge"}, "bridge"),
    ],
)
def test_the_stage_that_the_others_wait_for_is_named(found: dict[str, Any], stage: str) -> None:
    nothing = Facts((1,), is_consumer_bound=False, is_reading=False, num_running=0, is_collating=False)
    seen = replace(nothing, **found)
    assert seen.stage == stage
    report = describe_stall(seen, 12.34, {"worker 0 (pid 7)": "first line\nsecond line\n"})
    effect = "blocks the engine's event loop" if "blocked_in" in found else "the trainer waits"
    chunks = f"({seen.num_running} chunks run)"
    assert report == (
        f"no progress for 12.3 s: stage {stage} does not get on and {effect} {chunks}\n  worker 0 (pid 7):\n    first line\n    second line"
    )
