"""The engine's view of a worker process and of the chunks that it holds."""

from __future__ import annotations

import asyncio
import os
import time

from aioloader.errors import WorkerError
from aioloader.pools.chunk import Block, Destination, Room
from aioloader.pools.progress import ProgressPage
from aioloader.runtime.segments import SegmentViews
from aioloader.runtime.wire import Wire

__all__ = ["Pending", "WorkerHandle"]

Target = tuple[int, int, dict[str, Room], int]
"""A destination as it is sent: segment and its bytes, rooms, rows."""

_MAX_STACK_BYTES = 1 << 16


class Pending:
    """A chunk that a worker holds."""

    def __init__(self, num_records: int, raw_nbytes: int) -> None:
        self._num_records = num_records
        self._raw_nbytes = raw_nbytes
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_ns = time.monotonic_ns()
        self.is_sent = False
        self.block: Block | None = None
        self.death: WorkerError | None = None
        self.running: int | None = None
        """Index of the record that was running when the worker died, None if it had not begun this chunk."""

    def raw_nbytes_of(self, num_records: int) -> int:
        """Return what so many of its records took on their way."""
        return self._raw_nbytes * num_records // max(1, self._num_records)

    def finish(self) -> None:
        """Wake the caller, if it still waits."""
        if not self.done.done():
            self.done.set_result(None)


class WorkerHandle:
    """The engine's view of one worker process."""

    def __init__(self, name: str, pid: int, wire: Wire, progress: ProgressPage, stack: int) -> None:
        self.name = name
        self.pid = pid
        self.wire = wire
        self.progress = progress
        self._stack = stack
        self.pending: dict[int, Pending] = {}
        self.next_number = 0
        self.views = SegmentViews()
        self.returned: list[int] = []
        self.destinations: dict[int, Destination] = {}
        """Where chunks write to, as long as they may: also chunks for which nobody waits any more."""
        self.targets: set[int] = set()
        """The segments of destinations that the worker has mapped."""
        self.retired: list[int] = []
        self.timed_out_s: float | None = None
        self.last_block_ns = 0
        self.is_open = True

    def silent_s(self, now_ns: int) -> float:
        """Return the seconds since the last sign of life of a worker that holds chunks."""
        place = self.progress.place()
        since_ns = min(pending.sent_ns for pending in self.pending.values()) if place is None else place.since_ns
        return (now_ns - max(since_ns, self.last_block_ns)) / 1e9

    def target_of(self, destination: Destination | None) -> tuple[Target | None, list[int]]:
        """Return what the worker needs to know of a destination, with the descriptor if it does not have it yet."""
        if destination is None:
            return None, []
        is_known = destination.number in self.targets
        self.targets.add(destination.number)
        target = (destination.number, destination.nbytes, destination.rooms, destination.num_rows)
        return target, [] if is_known else [destination.descriptor]

    def take_retired(self) -> list[int]:
        """Return the segments that the worker is to forget, once."""
        retired, self.retired = self.retired, []
        return retired

    def revoke_queued(self, sent_before_ns: int) -> bool:
        """Take back the chunk that waits behind a running one, if it was sent before that time; return whether there was one."""
        if len(self.pending) < 2 or not self.is_open:
            return False
        number, pending = max(self.pending.items())
        is_waiting = pending.is_sent and not pending.done.done() and pending.sent_ns <= sent_before_ns
        if not is_waiting or not self.progress.revoke(number):
            return False
        pending.finish()
        return True

    def clear_stack(self) -> None:
        """Make room for a new stack; the file's offset is shared with the worker."""
        if self.is_open:
            os.ftruncate(self._stack, 0)
            os.lseek(self._stack, 0, os.SEEK_SET)

    def describe(self, now_ns: int) -> str:
        """Return what the worker is doing: the chunk's record, for how long, and the stack that it wrote."""
        if not self.is_open:
            return "was replaced"
        place = self.progress.place()
        if place is None:
            return "idle"
        stack = (
            os.pread(self._stack, _MAX_STACK_BYTES, 0).decode(errors="replace")
            or "no answer: stopped, or in native code that blocks signals"
        )
        return f"record {place.record_index} of its chunk, for {(now_ns - place.since_ns) / 1e9:.1f} s\n{stack}"

    def lose(self, error: WorkerError) -> None:
        """Fail the chunks that the dead worker held."""
        place = self.progress.place()
        for number, pending in self.pending.items():
            pending.death = error
            pending.running = place.record_index if place is not None and place.number == number else None
            pending.finish()

    def close(self) -> None:
        """Let go of the worker; its memory stays valid where it is still viewed."""
        if self.is_open:
            self.is_open = False
            self.wire.close()
            self.views.close()
            self.progress.close()
            os.close(self._stack)
