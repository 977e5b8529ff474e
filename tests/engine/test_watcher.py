"""The watcher sees a pass stand still, also where that blocks the event loop, and leaves one that goes on alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

import anyio
import anyio.lowlevel
import pytest

from aioloader.engine.watchdog import Facts
from aioloader.engine.watcher import Stall, Watcher

TIMEOUT_S = 0.2


def facts(progress: int = 1, *, is_consumer_bound: bool = False) -> Facts:
    return Facts((progress,), is_consumer_bound, is_reading=False, num_running=1, is_collating=False)


class Blocked:
    """Collects stalls that block the loop, whose thread goes on when there are `enough`."""

    def __init__(self, enough: int, *, look_on: bool = True) -> None:
        self.stalls: list[Stall] = []
        self.enough = threading.Event()
        self._num_enough = enough
        self._look_on = look_on

    def __call__(self, stall: Stall) -> bool:
        self.stalls.append(stall)
        if len(self.stalls) == self._num_enough:
            self.enough.set()
        return self._look_on


def never(stall: Stall) -> bool:
    raise AssertionError(stall)


async def test_a_stall_with_a_running_loop_is_told_to_the_loop_once_per_timeout() -> None:
    started = time.monotonic()
    with Watcher(TIMEOUT_S, facts, never) as watcher, anyio.fail_after(10):
        first = await watcher.stall()
        assert time.monotonic() - started >= TIMEOUT_S
        second = await watcher.stall()
        assert time.monotonic() - started >= 2 * TIMEOUT_S
    for stall in (first, second):
        assert stall.facts == facts()
        assert TIMEOUT_S <= stall.stalled_s <= time.monotonic() - started
        assert not any("engine" in name for name in stall.stacks)


@pytest.mark.parametrize("is_consumer_bound", [False, True])
async def test_a_blocked_loop_is_a_stall_whatever_it_knew_of_the_trainer(is_consumer_bound: bool) -> None:
    """Of what the trainer has taken a blocked loop hears nothing."""
    blocked = Blocked(2)
    with Watcher(TIMEOUT_S, lambda: facts(is_consumer_bound=is_consumer_bound), blocked):
        await anyio.lowlevel.checkpoint()
        started = time.monotonic()
        assert blocked.enough.wait(10)
        blocked_s = time.monotonic() - started
    assert blocked_s >= 2 * TIMEOUT_S - 0.1, "one look may have been before"
    for stall in blocked.stalls[:2]:
        assert stall.facts.blocked_in == "engine", "none of our own modules is on the stack"
        assert TIMEOUT_S <= stall.stalled_s <= blocked_s + TIMEOUT_S
        (stack,) = [stack for name, stack in stall.stacks.items() if name.startswith("aioloader-engine (thread ")]
        assert "assert blocked.enough.wait(10)" in stack


async def test_nobody_looks_on_after_the_report_that_ended_the_pass() -> None:
    blocked = Blocked(1, look_on=False)
    before = set(threading.enumerate())
    with Watcher(TIMEOUT_S, facts, blocked):
        (thread,) = set(threading.enumerate()) - before
        thread.join(10)
        assert not thread.is_alive()
    assert len(blocked.stalls) == 1


@pytest.mark.parametrize(
    "look", [lambda numbers: facts(next(numbers)), lambda _: facts(is_consumer_bound=True)], ids=["progress", "consumer"]
)
async def test_a_pass_that_goes_on_and_a_trainer_that_takes_its_time_are_no_stall(look: Callable[[Iterator[int]], Facts]) -> None:
    numbers = count()
    with Watcher(TIMEOUT_S, lambda: look(numbers), never) as watcher:
        with anyio.move_on_after(3 * TIMEOUT_S) as scope:
            await watcher.stall()
    assert scope.cancelled_caught


async def test_a_loop_that_is_blocked_now_and_then_is_no_stall() -> None:
    with Watcher(1.0, lambda: facts(is_consumer_bound=True), never) as watcher, anyio.move_on_after(1.5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watcher.stall)
            while True:
                time.sleep(0.3)  # noqa: ASYNC251 - longer than between two looks
                await anyio.sleep(0.01)


async def test_leaving_waits_for_a_report_that_has_begun_and_lets_none_begin() -> None:
    reporting, go_on = threading.Event(), threading.Event()
    done = []

    def report(_: Stall) -> bool:
        reporting.set()
        go_on.wait(10)
        done.append(True)
        return True

    with Watcher(TIMEOUT_S, facts, report):
        assert reporting.wait(10)
        threading.Timer(0.1, go_on.set).start()
    assert done == [True]


def test_a_loop_that_is_closed_under_it_leaves_no_thread() -> None:
    """What is left is found by the check around every test."""

    async def leave_running() -> Watcher:
        return Watcher(TIMEOUT_S, facts, lambda _: True).__enter__()

    watcher = asyncio.run(leave_running())
    time.sleep(TIMEOUT_S / 2)
    watcher.__exit__(None, None, None)
