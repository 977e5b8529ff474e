"""Rounds: small all-reduces that run in the background of training, with a deadline and the names of ranks that do not come."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data

from aioloader.errors import SynchronizationError

__all__ = ["Rounds", "has_other_ranks"]

_GRACE_S = 5.0
"""How long a roll call is open: ranks that wait look for one every second."""

_LOOK_EVERY_S = 1.0
_SLICE_S = 0.2  # a wait in the process group cannot be interrupted by Ctrl-C
_NEVER = datetime.timedelta(days=365)
"""A round may be begun long before anybody waits for it: between two steps there may be an evaluation. Deadlines are kept here."""

_numbers = itertools.count()


def has_other_ranks() -> bool:
    """Return whether this process can talk to other ranks: not in a worker process of a DataLoader, which has inherited their group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and torch.utils.data.get_worker_info() is None


class Rounds:
    """A gloo group of all ranks, for one loader. Not thread-safe; starts no thread of its own.

    Making one is collective and blocks until the others come: all ranks make theirs in the same order.

    Args:
        timeout_s: How long this rank waits for the others before it says who is missing.

    Raises:
        SynchronizationError: A rank did not come in time to make the group.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._world = dist.group.WORLD
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._name = f"aioloader/rounds/{next(_numbers)}"
        self._minimum = dist.AllreduceOptions()
        self._minimum.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._minimum.timeout = _NEVER
        self._running: deque[tuple[Any, torch.Tensor]] = deque()
        self._left: list[tuple[Any, torch.Tensor]] = []
        """Rounds whose results nobody wants any more; their memory is still written to."""
        self.rank: int = dist.get_rank()
        self.pass_number = 0
        self._waiting_since_s: float | None = None
        self._look_s = 0.0
        self._roll_call_ends_s: float | None = None
        self._failure: Exception | None = None
        self._meet()
        self._group: Any = dist.new_group(backend="gloo", timeout=_NEVER)

    @property
    def is_current(self) -> bool:
        """Return whether the default process group is still the one that this was made in."""
        return dist.is_initialized() and dist.group.WORLD is self._world

    @property
    def is_running(self) -> bool:
        """Return whether a round was begun whose result was not taken."""
        return bool(self._running) or self._roll_call_ends_s is not None

    def begin_pass(self) -> int:
        """Forget the rounds of the pass before, and return the number of the one that begins."""
        self._left = [one for one in (*self._left, *self._running) if not one[0].is_completed()]
        self._running.clear()
        self._waiting_since_s = self._roll_call_ends_s = self._failure = None
        self.pass_number += 1
        return self.pass_number

    def begin(self, numbers: Sequence[int]) -> None:
        """Begin a round; returns at once."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        try:
            self._running.append((self._group.allreduce([tensor], self._minimum), tensor))
        except RuntimeError as error:
            self._call_roll(error)

    def take(self) -> list[int] | None:
        """Return the element-wise minimum of the numbers of all ranks in the oldest round, or None if that is not known yet.

        Once called, the deadline runs until there is a result.

        Raises:
            SynchronizationError: A rank did not come in time, or the connection to it is gone; `missing` names those that gave no sign.
        """
        if self._roll_call_ends_s is not None:
            if time.monotonic() >= self._roll_call_ends_s:
                raise self._missing() from self._failure
            return None
        if not self._running:
            return None
        work, tensor = self._running[0]
        if not work.is_completed():
            self._look_at_the_clock()
            return None
        try:
            work.wait()
        except RuntimeError as error:
            self._call_roll(error)
            return None
        self._running.popleft()
        self._waiting_since_s = None
        result: list[int] = tensor.tolist()
        return result

    def wait(self) -> None:
        """Wait, blocking, for a result to take; returns now and then without one."""
        if self._roll_call_ends_s is not None or not self._running:
            time.sleep(_SLICE_S / 4)
            return
        with contextlib.suppress(RuntimeError):  # time is up, or the round failed: `take` tells which
            self._running[0][0].wait(datetime.timedelta(seconds=_SLICE_S))

    def close(self) -> None:
        """Give the group back, unless it still waits for a rank: then it ends with the process group."""
        if self._group is None:
            return
        pending = [*self._left, *self._running]
        group, self._group = self._group, None
        if self.is_current and all(work.is_completed() for work, _ in pending):
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # whoever destroys the default group destroys this too
                dist.destroy_process_group(group)
        self._running.clear()

    def _meet(self) -> None:
        """Wait until all ranks are there."""
        started, pause_s = time.monotonic(), 0.001
        self._store.set(self._key(self.rank), "here")
        num_here = self._store.add(self._key("number"), 1)
        while num_here < dist.get_world_size():
            if time.monotonic() - started > self._timeout_s:
                raise self._missing()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            num_here = self._store.add(self._key("number"), 0)

    def _look_at_the_clock(self) -> None:
        """Begin a roll call when time is up, or when another rank has begun one."""
        now = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s, self._look_s = now, now + _LOOK_EVERY_S
        grace_s = self._grace_s
        if now - self._waiting_since_s >= self._timeout_s - grace_s:
            self._call_roll(None)
        elif now >= self._look_s:
            self._look_s = now + _LOOK_EVERY_S
            with contextlib.suppress(RuntimeError):
                if self._store.check([self._key("roll call")]):
                    self._call_roll(None)

    @property
    def _grace_s(self) -> float:
        return min(_GRACE_S, self._timeout_s / 2)

    def _call_roll(self, failure: Exception | None) -> None:
        """Say that this rank is here, and have all that wait say so."""
        if self._roll_call_ends_s is not None:
            return
        self._failure = failure
        self._roll_call_ends_s = time.monotonic() + self._grace_s
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            self._store.set(self._key(self.rank), "here")
            self._store.set(self._key("roll call"), "now")

    def _missing(self) -> SynchronizationError:
        """Return the error that names the ranks that gave no sign."""
        size = dist.get_world_size()
        reason = f"within {self._timeout_s:g} s" if self._failure is None else "after a connection was lost"
        try:
            missing = [rank for rank in range(size) if not self._store.check([self._key(rank)])]
        except RuntimeError:
            return SynchronizationError(
                "end of data",
                f"on rank {self.rank}: expected all {size} ranks to agree on the next step, got no answer {reason}, and the store that "
                "says who is there is gone too; look for a rank that stopped, first of all rank 0",
            )
        listed = ", ".join(map(str, missing)) or "none in particular"
        return SynchronizationError(
            "end of data",
            f"on rank {self.rank}: expected all {size} ranks to agree on the next step, got no sign of rank {listed} {reason}; "
            "look in the logs there for why it stopped, or give Loader a larger end_timeout_s if it is only slow",
            missing=missing,
        )

    def _key(self, name: object) -> str:
        return f"{self._name}/{self.pass_number}/{name}"
