"""Looks at a running pass from a thread of its own, which also sees that something blocks the pass's event loop.

Collators, batchings, asynchronous sources and whatever pickles a record or a sample are the user's and run in that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from aioloader.engine.watchdog import Facts, Watchdog
from aioloader.runtime.signal import Signal

__all__ = ["Stall", "Watcher", "blocked_stage"]

_MAX_PAUSE_S = 5.0
_LOOKS = 4
"""In the time after which standing still is a stall."""

_USERS_THREADS = ("aioloader-source", "aioloader-collate")
_STAGES = {
    "aioloader.sources.reading": "source",
    "aioloader.pools.processes": "preprocess",
    "aioloader.pools.threads": "preprocess",
    "aioloader.engine.assembler": "batch",
    "aioloader.engine.output": "collate",
    "aioloader.engine.outbox": "bridge",
}
"""Modules from which the event loop runs what is the user's."""


class Stall(NamedTuple):
    """What was to be seen, for how many seconds nothing had moved, and where threads that run the user's code stood."""

    facts: Facts
    stalled_s: float
    stacks: dict[str, str]


class Watcher:
    """A daemon thread that looks at a pass of this event loop, from `with` on until its end.

    Args:
        timeout_s: For how long a pass may stand still.
        facts: Returns what is to be seen; called in the thread.
        on_blocked: Called in the thread with a stall in which the loop cannot be told anything; returns whether to look on. Leaving `with`
            waits for it.
    """

    def __init__(self, timeout_s: float, facts: Callable[[], Facts], on_blocked: Callable[[Stall], bool]) -> None:
        self._watchdog = Watchdog(timeout_s, time.monotonic())
        self._pause_s = min(_MAX_PAUSE_S, timeout_s / _LOOKS)
        self._facts = facts
        self._on_blocked = on_blocked
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self._reporting = threading.Lock()
        self._stalls: deque[Stall] = deque()
        self._arrived = Signal()

    def __enter__(self) -> Watcher:
        threading.Thread(target=self._watch, name="aioloader-watcher", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._reporting:
            self._stopped.set()
        self._answered.set()

    async def stall(self) -> Stall:
        """Wait for the next stall in which the loop runs."""
        while not self._stalls:
            await self._arrived.wait()
        return self._stalls.popleft()

    def _watch(self) -> None:
        while not self._stopped.wait(self._pause_s):
            is_blocked = not self._loop_answers()
            facts = self._facts()
            if is_blocked:
                facts = replace(facts, blocked_in=blocked_stage(sys._current_frames().get(self._loop_thread)))
            stalled_s = self._watchdog.look(facts, time.monotonic())
            if stalled_s is None:
                continue
            stall = Stall(facts, stalled_s, _stacks(self._loop_thread if is_blocked else None))
            if not is_blocked:
                self._call(self._tell, stall)
                continue
            with self._reporting:
                if self._stopped.is_set() or not self._on_blocked(stall):
                    return

    def _loop_answers(self) -> bool:
        """Return whether the loop runs: it has as long for an answer as there is between two looks."""
        self._answered.clear()
        self._call(self._answered.set)
        return self._stopped.is_set() or self._answered.wait(self._pause_s)

    def _tell(self, stall: Stall) -> None:
        self._stalls.append(stall)
        self._arrived.notify()

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)


def blocked_stage(frame: FrameType | None) -> str:
    """Return the stage that a blocked event loop is in, by the innermost of our modules that hands over to the user's code."""
    while frame is not None:
        stage = _STAGES.get(frame.f_globals.get("__name__", ""))
        if stage is not None:
            return stage
        frame = frame.f_back
    return "engine"


def _stacks(loop_thread: int | None) -> dict[str, str]:
    """Return where the threads of this process stand that run sources and collators, and that of a loop that is blocked."""
    frames = sys._current_frames()
    stacks = {}
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and (thread.ident == loop_thread or thread.name.startswith(_USERS_THREADS)):
            name = "aioloader-engine" if thread.ident == loop_thread else thread.name
            stacks[f"{name} (thread {thread.native_id})"] = "".join(traceback.format_stack(frame))
    return stacks
