"""The trainer's side of the engine: starts the sidecar or the thread that hosts it, talks to it, ends it.

Both hosts speak the same protocol over a socket. The sidecar is the default: beside a thread in the trainer, Python-heavy
training steps and the engine would fight for one interpreter lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import threading
import time
from typing import Any, Literal, NamedTuple, NoReturn

from aioloader.engine.channel import BATCH, END, ERROR, RUN, STATS, TAKEN, Delivered
from aioloader.engine.inbox import Inbox
from aioloader.engine.plan import Plan, Run
from aioloader.engine.sidecar import run_engine
from aioloader.errors import HostError
from aioloader.protocols import Json
from aioloader.runtime.moving import dumps, unpack_error
from aioloader.runtime.segments import PageLock
from aioloader.runtime.spawn import ZygoteProcess, describe_exit
from aioloader.runtime.wire import Frame, Wire, WireClosedError

__all__ = ["Ahead", "Ended", "Host", "HostDied"]

_SIDECAR, _WORKER = "aioloader.engine.sidecar", "aioloader.pools.worker"
_EXIT_TIMEOUT_S = 1.0
_JOIN_TIMEOUT_S = 2.0
_LAST_STATS_S = 0.2  # what closing may wait for the numbers of a pass that is left; an engine that is well answers in a few ms
_MAX_HELD_SEGMENTS = 64  # a trainer that keeps more batches gets copies, so that shared memory stays bounded


class Ended(Exception):  # noqa: N818 - a result, not a mistake
    """The pass is over; `state` starts the next one."""

    def __init__(self, state: Json) -> None:
        self.state = state
        super().__init__("the pass is over")


class Ahead(NamedTuple):
    """What can be received without waiting: so many micro-batches, and what comes right after them."""

    num_batches: int
    then: Literal["nothing yet", "end", "failure"]


class HostDied(HostError):  # noqa: N818 - what happened, and seldom an error: another host goes on from the last state
    """The engine's process ended by itself."""


class Host:
    """A running engine. Not thread-safe."""

    def __init__(self, plan: Plan, kind: str, lock: PageLock | None = None) -> None:
        self._owner_pid = os.getpid()
        self._inbox = Inbox(_MAX_HELD_SEGMENTS, lock)
        self._stats: dict[str, Any] = {}
        self._last: Frame | None = None
        """What ended the pass, if it came while the micro-batches before it were not taken yet."""
        self._num_untold = 0
        self._is_running = False
        self._thread: threading.Thread | None = None
        self._sidecar_pid: int | None = None
        """Known once it was needed: the trainer does not wait for the fork."""
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours)
        self._zygote = _zygote_for(kind, plan.pool)
        client = None if self._zygote is None else self._zygote.connect()
        if kind == "thread":
            self._thread = threading.Thread(target=run_engine, args=(plan, theirs, client), name="aioloader-engine", daemon=True)
            self._thread.start()
            return
        assert self._zygote is not None
        assert client is not None
        with theirs, client:
            self._zygote.begin_fork(f"{_SIDECAR}:main", "aioloader-engine", dumps(plan), [theirs.fileno(), client.fileno()])

    @property
    def is_inherited(self) -> bool:
        """Return whether this is a forked copy of a host that belongs to the parent process."""
        return self._owner_pid != os.getpid()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is something to `receive`."""
        return self._wire.fileno()

    def run(self, run: Run) -> None:
        """Start a pass."""
        self._is_running = True
        self._send(RUN, pickle.dumps(run))

    def try_receive(self) -> Delivered | None:
        """Return the next micro-batch, or None if it is not there yet.

        Raises:
            Ended: The pass is over.
            AioLoaderError: The pass failed; everything before the failing record was received.
        """
        batch = self._inbox.next()
        if batch is not None:
            return batch
        frame = self._next_frame()
        if frame is None:
            self._tell()  # else each might wait for the other
            return None
        if frame.kind != BATCH:
            self._end(frame)
        self._inbox.add(frame)
        return self._inbox.next()

    def look(self) -> Ahead:
        """Return what is there, without taking it."""
        is_closed = False
        try:
            while self._last is None and (frame := self._wire.try_receive()) is not None:
                self._keep(frame)
        except WireClosedError:
            is_closed = True
        if not self._inbox:
            self._tell()
        if self._last is not None:
            return Ahead(len(self._inbox), "end" if self._last.kind == END else "failure")
        return Ahead(len(self._inbox), "failure" if is_closed else "nothing yet")

    def wait(self) -> None:
        """Wait, blocking, until there is something to receive."""
        self._wire.wait()

    def taken(self) -> None:
        """Note that a micro-batch was delivered; the engine hears of several at once, and which shared memory is free again."""
        self._num_untold += 1
        if self._num_untold >= self._inbox.told_every:
            self._tell()

    def stats(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the engine's numbers as of now, or the last known ones if it ended or does not answer in time."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._tell()
        with contextlib.suppress(HostError, WireClosedError):
            self._send(STATS)
            while (frame := self._wire.receive(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))) is not None:
                if frame.kind == STATS:
                    self._stats = pickle.loads(frame.meta)
                    break
                self._keep(frame)
        return self._stats

    def last_stats(self) -> dict[str, Any]:
        """Return the engine's numbers for the last time before `close`: those that came with the end of its pass or with its failure.

        Of a pass that is left they are as of now, or the last known ones if the engine ended or does not answer within 0.2 s.
        """
        is_engine_thread = self._thread is threading.current_thread()  # the garbage collector runs anywhere
        if self._is_running and not self.is_inherited and not is_engine_thread:
            with contextlib.suppress(Exception):  # say, half a message because of a Ctrl-C: closing goes on
                self.stats(_LAST_STATS_S)
        return self._stats

    def close(self) -> None:
        """End the engine and everything it started; safe to call twice. Batches in hand stay valid."""
        self._wire.close()
        if self._zygote is not None:
            self._zygote.close()
        if self._thread is not None and self._owner_pid == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)
        self._inbox.close()

    def _next_frame(self) -> Frame | None:
        """Return the next message, None if it is not there yet."""
        if self._last is not None:
            last, self._last = self._last, None
            return last
        try:
            return self._wire.try_receive()
        except WireClosedError as error:
            raise self._death() from error

    def _keep(self, frame: Frame) -> None:
        """Keep what came ahead of time."""
        if frame.kind == BATCH:
            self._inbox.add(frame)
        else:
            self._last = frame

    def _end(self, frame: Frame) -> NoReturn:
        """Raise what ended the pass."""
        self._is_running = False
        self._tell()
        if frame.body:
            self._stats = pickle.loads(frame.body)
        if frame.kind == END:
            raise Ended(json.loads(bytes(frame.meta)))
        if frame.kind == ERROR:
            raise unpack_error(frame.meta)
        raise HostError(f"engine: expected micro-batches, an end or an error, got message {frame.kind}; report this.")

    def _tell(self) -> None:
        """Tell the engine how many micro-batches were delivered since the last time."""
        if self._num_untold:
            number, self._num_untold = self._num_untold, 0
            self._send(TAKEN, pickle.dumps((number, self._inbox.take_returned())))

    def _send(self, kind: int, meta: bytes = b"") -> None:
        with contextlib.suppress(WireClosedError):  # the next receive says how the engine ended
            self._wire.send(kind, meta)

    def _death(self) -> HostError:
        if self._thread is not None or self._zygote is None:
            return HostError("engine thread: expected it to run until the loader closes, but it ended; see its output above.")
        if self._sidecar_pid is None:
            self._sidecar_pid = self._zygote.finish_fork()
        exitcode = self._zygote.exit_of(self._sidecar_pid, _EXIT_TIMEOUT_S)
        return HostDied(
            f"sidecar (pid {self._sidecar_pid}): expected it to run until the loader closes, but it {describe_exit(exitcode)}; "
            "look for the out-of-memory killer, then load the last state_dict() into a new loader."
        )


def _zygote_for(kind: str, pool: str) -> ZygoteProcess | None:
    """Return the zygote of a host, with the modules of what is forked from it; none where everything is a thread."""
    if kind != "thread":
        return ZygoteProcess([_SIDECAR, _WORKER])
    return None if pool == "thread" else ZygoteProcess([_WORKER])
