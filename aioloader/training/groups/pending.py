"""An all-reduce under way, waited for with a deadline whose error says who is missing."""

from __future__ import annotations

import datetime
import time

import torch.distributed as dist

from aioloader.errors import SynchronizationError
from aioloader.training.groups.roll_call import Attendance, RollCall

__all__ = ["Pending", "failed_collective"]

_LOOK_EVERY_S = 1.0
"""How often a rank that waits looks for a roll call."""

_POLL_S = 0.0002  # an accelerator's collective cannot be waited for with a deadline and then go on


class Pending:
    """One all-reduce under way; `wait` returns when its tensor holds the result.

    Args:
        work: What the process group returned.
        operation: Named in errors.
        roll_call: Where the ranks of the group say who is there.
        rank: This rank's place in the group; `size` is the group's.
        on_host: The tensor lies in the memory of the CPU, where `work.wait` blocks.
    """

    def __init__(self, work: dist.Work, *, operation: str, roll_call: RollCall, rank: int, size: int, on_host: bool) -> None:
        self._work = work
        self._operation = operation
        self._roll_call = roll_call
        self._rank = rank
        self._size = size
        self._on_host = on_host

    @property
    def is_completed(self) -> bool:
        """Return whether there is a result, or a failure."""
        return self._work.is_completed()

    def wait(self, timeout_s: float, operation: str | None = None) -> None:
        """Wait at most `timeout_s`, and name `operation` in errors.

        Raises:
            SynchronizationError: The collective failed, or a rank did not come in time; `missing` names it.
        """
        operation = operation or self._operation
        started_s = time.monotonic()
        timeout_s = max(timeout_s, 0.001)
        ends_s = started_s + timeout_s
        roll_call_s = ends_s - RollCall.grace_s(timeout_s)
        failure: RuntimeError | None = None
        attendance, until_s = Attendance([], {}), 0.0
        try:
            while not attendance.missing and time.monotonic() < ends_s:
                if self._wait_once(min(_LOOK_EVERY_S, max(roll_call_s, time.monotonic()) - time.monotonic())):
                    if until_s:
                        self._roll_call.close()  # left open, it would cut short every later wait
                    return
                if time.monotonic() >= roll_call_s or self._roll_call.is_open:
                    until_s = min(ends_s, time.monotonic() + RollCall.grace_s(timeout_s))
                    attendance = self._roll_call.hold(operation, until_s, lambda missing: self._work.is_completed())
            if self._wait_once(0.0):
                self._roll_call.close()  # the last rank came while it was open
                return
        except RuntimeError as error:
            failure = error
            until_s = until_s or time.monotonic() + RollCall.grace_s(timeout_s)
            attendance = self._roll_call.hold(operation, until_s, lambda missing: not missing)
        got = f"{attendance.describe()} within {time.monotonic() - started_s:.1f} s"
        message = failed_collective(self._rank, self._size, got, failure)
        raise SynchronizationError(operation, message, missing=attendance.missing) from failure

    def wait_in_stream(self, timeout_s: float, operation: str) -> None:
        """As `wait`, but on an accelerator only its current stream waits and this returns at once."""
        if self._on_host:
            self.wait(timeout_s, operation)
        else:
            self._work.wait()

    def _wait_once(self, seconds: float) -> bool:
        """Return whether there is a result; raises RuntimeError where there is a failure."""
        seconds = max(seconds, 0.001)
        if not self._on_host:
            ends_s = time.monotonic() + seconds
            while not self._work.is_completed() and time.monotonic() < ends_s:
                time.sleep(_POLL_S)
        elif not self._work.is_completed():
            try:
                self._work.wait(datetime.timedelta(seconds=seconds))
                return True
            except RuntimeError:
                pass  # either time is up or it failed: the second wait tells
        if not self._work.is_completed():
            return False
        self._work.wait()
        return True


def failed_collective(rank: int, size: int, got: str, failure: RuntimeError | None) -> str:
    """Return the message of a collective that not all ranks took part in."""
    reason = str(failure or "").strip().splitlines()
    cause = f" ({reason[0]})" if reason else ""
    return (
        f"on dp_rank {rank}: expected all {size} data-parallel ranks to take part, got {got}{cause}; "
        "look in the log of the missing rank for why it stopped, or for a rank that is elsewhere in its step"
    )
