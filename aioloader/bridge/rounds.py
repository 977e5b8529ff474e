"""Rounds: small all-reduces that run in the background of training, with a deadline and the names of ranks that do not come."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data

from aioloader.bridge.groups import Group
from aioloader.errors import SynchronizationError

__all__ = ["Rounds", "has_other_ranks"]

_GRACE_S = 5.0
"""How long a roll call is open: ranks that wait look for one every second."""

_LOOK_EVERY_S = 1.0
_NOTHING = (1 << 63) - 1
"""In the place of another rank: a minimum ignores it."""

_SLICE_S = 0.2  # a wait in the process group cannot be interrupted by Ctrl-C

_numbers: defaultdict[tuple[str, tuple[int, ...]], itertools.count[int]] = defaultdict(itertools.count)
"""How many were made for a purpose and some ranks: names in the store that all of them come to alike."""


def has_other_ranks(num_ranks: int = 2) -> bool:
    """Return whether this process can talk to so many ranks, itself among them.

    Not in a worker process of a DataLoader, which has inherited their group; nor where a rank of a mesh of more ranks is played.
    """
    is_rank = dist.is_available() and dist.is_initialized() and torch.utils.data.get_worker_info() is None
    return is_rank and dist.get_world_size() >= max(2, num_ranks)


class Rounds:
    """A gloo group of ranks, for one loader. Not thread-safe; starts no thread of its own.

    Making one is collective and blocks until the others come: its ranks make theirs in the same order, and those of the job that take
    no part make a `Group` of the same ranks.

    Args:
        timeout_s: How long this rank waits for the others before it says who is missing.
        ranks: Those that take part, this one included; None: all.
        operation: Named in errors.
        task: What the ranks are to do together, for errors.
        width: Numbers in every round, to which fewer are filled up: rounds of two lengths that meet would end the process.

    Raises:
        SynchronizationError: A rank did not come in time to make the group.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        ranks: Sequence[int] | None = None,
        operation: str = "end of data",
        task: str = "agree on the next step",
        width: int = 0,
    ) -> None:
        self._timeout_s = timeout_s
        self.ranks = list(range(dist.get_world_size()) if ranks is None else ranks)
        self._operation = operation
        self._task = task
        self._width = width
        self._store: Any = dist.distributed_c10d._get_default_store()
        number = next(_numbers[operation, tuple(self.ranks)])
        self._name = f"aioloader/{operation}/{'all' if ranks is None else '-'.join(map(str, self.ranks))}/{number}"
        self._running: deque[tuple[Any, torch.Tensor]] = deque()
        self._left: list[tuple[Any, torch.Tensor]] = []
        """Rounds whose results nobody wants any more; their memory is still written to."""
        self.rank: int = dist.get_rank()
        self.pass_number = 0
        self._waiting_since_s: float | None = None
        self._look_s = 0.0
        self._roll_call_ends_s: float | None = None
        self._failure: Exception | None = None
        self._group: Group | None = None
        self._meet()
        self._group = self._connected(ranks)

    @property
    def is_current(self) -> bool:
        """Return whether the default process group is still the one that this was made in."""
        return self._group is not None and self._group.is_current

    @property
    def is_running(self) -> bool:
        """Return whether a round was begun whose result was not taken."""
        return bool(self._running) or self._roll_call_ends_s is not None

    @property
    def is_done(self) -> bool:
        """Return whether `take` would return or raise now."""
        return self._roll_call_ends_s is not None or (bool(self._running) and self._running[0][0].is_completed())

    def begin_pass(self) -> int:
        """Forget the rounds of the pass before, and return the number of the one that begins."""
        self._left = [one for one in (*self._left, *self._running) if not one[0].is_completed()]
        self._running.clear()
        self._waiting_since_s = self._roll_call_ends_s = self._failure = None
        self.pass_number += 1
        return self.pass_number

    def begin(self, numbers: Sequence[int]) -> None:
        """Begin a round; returns at once."""
        tensor = torch.tensor([*numbers, *[_NOTHING] * (self._width - len(numbers))], dtype=torch.int64)
        try:
            assert self._group is not None, "rounds are begun before they are closed"
            self._running.append((self._group.minimum(tensor), tensor))
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

    def answer(self) -> None:
        """Give a sign of life where other ranks ask for it: for a rank that has no need to know the result of a round yet."""
        if (now := time.monotonic()) >= self._look_s:
            self._look_s = now + _LOOK_EVERY_S
            with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
                if self._store.check([self._key("roll call")]):
                    self._store.set(self._key(self.rank), "here")

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank, in the order of `ranks`; all give equally many. Blocks until they are there.

        It may meet rounds that others began in a pass before, and left: theirs follows. For that, rounds have one width, and the first
        two numbers of each are the pass and its negative.

        Raises:
            SynchronizationError: As `take`.
        """
        assert not self.is_running, "an exchange begins where no round is open"
        own, width = self.ranks.index(self.rank), len(numbers)
        slots = [_NOTHING] * (width * len(self.ranks))
        slots[own * width : (own + 1) * width] = numbers
        head = [self.pass_number, -self.pass_number, _NOTHING]
        while True:
            self.begin([*head, *slots])
            while (result := self.take()) is None:
                self.wait()
            if result[0] == self.pass_number:
                return [result[at : at + width] for at in range(len(head), len(head) + len(slots), width)]

    def publish(self, name: str, text: str) -> None:
        """Leave a text for the other ranks."""
        self._store.set(self._key(f"{name}/{self.rank}"), text)

    def read(self, name: str, rank: int, timeout_s: float) -> str | None:
        """Return the text of another rank, None if it left none in time."""
        until = time.monotonic() + timeout_s
        key = self._key(f"{name}/{rank}")
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            while not self._store.check([key]):
                if time.monotonic() >= until:
                    return None
                time.sleep(0.01)
            return str(self._store.get(key).decode())
        return None

    def close(self) -> None:
        """Give the group back; one that is in the middle of a round when that is over, or with the process group."""
        if self._group is not None:
            self._group.give_back([*self._left, *self._running])
            self._group = None
            self._running.clear()

    def __del__(self) -> None:
        """Give the group of a loader back that nobody closed."""
        with contextlib.suppress(Exception):  # at interpreter exit parts of torch may be gone
            self.close()

    def _meet(self) -> None:
        """Wait until all ranks are there."""
        started, pause_s = time.monotonic(), 0.001
        self._store.set(self._key(self.rank), "here")
        num_here = self._store.add(self._key("number"), 1)
        while num_here < len(self.ranks):
            if time.monotonic() - started > self._timeout_s:
                raise self._missing()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            num_here = self._store.add(self._key("number"), 0)

    def _connected(self, ranks: Sequence[int] | None) -> Group:
        """Return the group. Where a rank that was there is gone before it is connected, all that are left say so before it is named."""
        try:
            return Group(ranks, timeout_s=self._timeout_s, operation=self._operation)
        except SynchronizationError as error:
            self.pass_number = -1
            self._call_roll(error)
            time.sleep(self._grace_s)
            raise self._missing() from error

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
        reason = f"within {self._timeout_s:g} s" if self._failure is None else "and a connection that was lost"
        expected = f"on rank {self.rank}: expected {len(self.ranks)} ranks to {self._task}"
        try:
            missing = [rank for rank in self.ranks if not self._store.check([self._key(rank)])]
        except RuntimeError:
            return SynchronizationError(
                self._operation,
                f"{expected}, got no answer {reason}, and the store that says who is there is gone too; "
                "look for a rank that stopped, first of all rank 0",
            )
        got = f"no sign of rank {', '.join(map(str, missing))}" if missing else "no answer, though each is there,"
        return SynchronizationError(
            self._operation,
            f"{expected}, got {got} {reason}; "
            "look in the logs there for why it stopped, or give Loader a larger end_timeout_s if it is only slow",
            missing=missing,
        )

    def _key(self, name: object) -> str:
        return f"{self._name}/{self.pass_number}/{name}"
