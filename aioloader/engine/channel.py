"""The messages between the engine and the trainer, and how a micro-batch crosses: arrays in shared memory, the rest in a message.

Large arrays may lie there already, written by the workers; see `reservations.py`.

trainer -> engine    RUN (start a pass), TAKEN (micro-batches delivered, segments returned), STATS
engine -> trainer    BATCH (one or several), END (the pass is over), ERROR (the pass failed), STATS
"""

from __future__ import annotations

import functools
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aioloader.engine.layout import Layout
from aioloader.engine.output import Ready, TensorArray, list_records
from aioloader.engine.placement import Reserved
from aioloader.engine.reservations import Reservations, rooms_of
from aioloader.errors import BatchError
from aioloader.protocols import Json, RecordId
from aioloader.runtime.budget import Budget
from aioloader.runtime.moving import dumps
from aioloader.runtime.segments import Arena, PageLock, Segment, SegmentViews
from aioloader.runtime.signal import Signal
from aioloader.runtime.wire import Frame, Wire

__all__ = ["BATCH", "END", "ERROR", "INLINE_BYTES", "RUN", "STATS", "TAKEN", "Delivered", "Inbox", "Outbox"]

RUN, TAKEN, STATS = 1, 2, 3
BATCH, END, ERROR = 11, 12, 13

INLINE_BYTES = 1 << 13  # below this a copy through the socket is cheaper than a segment's bookkeeping
_MAX_TOGETHER = 16
_TOGETHER_BYTES = 1 << 18  # a trainer that keeps one micro-batch of a message keeps the memory of all
_MIN_PREFETCH = 2
_MAX_PREFETCH = 16
_MAX_PREFETCH_BYTES = 1 << 20
_TOLD_SHARE = 2  # of the micro-batches that may wait: so many deliveries are worth a message, which wakes the engine


class Delivered:
    """A micro-batch on the trainer's side. Its arrays lie in shared memory, which is reused once they are all gone.

    Attributes:
        layout: Where the arrays lie.
        memory: uint8[layout.nbytes] or bytes, writable.
        others: The fields that are no arrays, by name.
        cause: What the engine was waiting for before it; an index into `telemetry.waits.CAUSES`.
    """

    __slots__ = (
        "_records",
        "_state",
        "cause",
        "epoch",
        "lane",
        "layout",
        "memory",
        "num_padding",
        "num_samples",
        "num_targets",
        "num_tokens",
        "others",
        "step",
    )

    def __init__(self, head: tuple[int, ...], layout: Layout, memory: Any, others: dict[str, Any], records: bytes, state: bytes) -> None:
        self.step, self.lane, self.epoch, self.num_tokens, self.num_padding, self.num_targets, self.num_samples, self.cause = head
        self.layout = layout
        self.memory = memory
        self.others = others
        self._records = records
        self._state = state

    @property
    def is_filler(self) -> bool:
        """Return whether it only keeps lanes in step: it has neither samples nor fields."""
        return not self.num_samples and not self.layout.names

    def load_records(self) -> list[tuple[RecordId, int, int]]:
        """Return ((shard, row), seq, sub) of each sample."""
        return list_records(pickle.loads(self._records))

    def state_loader(self) -> Callable[[], Json]:
        """Return a function that returns what of the rank's state is new with this micro-batch, and keeps nothing else alive."""
        return functools.partial(pickle.loads, self._state)

    @property
    def records_and_state(self) -> tuple[bytes, bytes]:
        """Return the provenance and the state as they came, pickled."""
        return self._records, self._state


class Outbox:
    """The engine's end: sends micro-batches, several in one message where they are small and ready together.

    Never more than `prefetch_batches` of them wait for the trainer. None: two, and more where they are small: up to 16, as long as
    they take 1 MiB and half of the records in flight at most.

    Args:
        company_s: A micro-batch that comes later than this after the one before is not kept waiting for others.
    """

    def __init__(
        self,
        wire: Wire,
        prefetch_batches: int | None,
        *,
        max_free_bytes: int = 1 << 28,
        inline_bytes: int = INLINE_BYTES,
        company_s: float = 0.0005,
    ) -> None:
        self._wire = wire
        self._company_s = company_s
        self._inline_bytes = inline_bytes
        self._arena = Arena(max_free_bytes, keeps_descriptors=True)
        self._max_reserved_bytes = 2 * max_free_bytes
        self._prefetch_batches = prefetch_batches
        self._waiting: deque[tuple[int, int]] = deque()
        """Records and bytes of each micro-batch that was put and not delivered yet."""
        self.batch_bytes = 0
        self.num_placed = 0
        self.num_missed = 0
        self._waiting_bytes = 0
        self._reservations = Reservations(self._arena)
        self.on_retired: Callable[[list[int]], None] = _ignore
        """Told of segments that are given back to the system, which may have been reserved before."""
        self._taken = Signal()
        self._layout: Layout | None = None
        self._message: _Message | None = None
        self._put_s = 0.0
        self.budget: Budget | None = None

    @property
    def num_waiting(self) -> int:
        """Return the micro-batches put and not yet delivered."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Return whether one more micro-batch may wait for the trainer."""
        number = len(self._waiting)
        if self._prefetch_batches is not None:
            return number < self._prefetch_batches
        if number < _MIN_PREFETCH:
            return True
        if number >= _MAX_PREFETCH or self._waiting_bytes + self.batch_bytes > _MAX_PREFETCH_BYTES:
            return False
        return self.budget is None or not self.budget.slots.is_mostly_ready

    @property
    def waiting_bytes(self) -> int:
        """Return the bytes of micro-batches that wait for the trainer, and of those reserved."""
        self._reservations.collect()
        return self._waiting_bytes + self._reservations.nbytes

    async def room(self) -> None:
        """Wait until one more micro-batch may wait for the trainer, which gets those put before."""
        await self.flush()
        while not self.has_room:
            await self._taken.wait()

    async def put(self, ready: Ready, cause: int = 0) -> None:
        """Load one micro-batch, with what the engine was waiting for before it.

        It leaves at once, or where the last one came just before, with those that come right after it: at the latest with `flush`.

        Raises:
            BatchError: The collator returned something that cannot move to the trainer.
        """
        known = self._layout is not None and self._layout.fits(ready.fields)
        layout = self._layout if self._layout is not None and known else Layout.of(ready.fields)
        others = b""
        if len(layout.arrays) < len(layout.names):
            others = _pack_others({name: field for name, field in ready.fields.items() if not isinstance(field, TensorArray)}, ready)
        nbytes = layout.nbytes
        claimed = self._claim(layout, ready.fields)
        if self._message is not None and (claimed is not None or self._message.room < nbytes):
            await self.flush()
        self._waiting.append((ready.num_records, nbytes))
        self._waiting_bytes += nbytes
        self.batch_bytes = nbytes
        message = self._message
        if message is None:
            message = self._message = self._begin(nbytes) if claimed is None else _Message(claimed[0], claimed[0].memory, nbytes)
        offset = message.num_used
        for field in layout.arrays:
            if field.num_elements and (claimed is None or field.name not in claimed[1]):
                ready.fields[field.name].write(np.ndarray(field.shape, field.dtype, message.memory, offset + field.offset))
        self._layout = layout
        head = (ready.step, ready.lane, ready.epoch, ready.num_tokens, ready.num_padding, ready.num_targets, ready.num_samples, cause)
        records, state = pickle.dumps(ready.provenance), pickle.dumps(ready.state)
        message.entries.append((head, None if known else layout, others, records, state, offset))
        message.num_used = offset + nbytes
        message.room -= nbytes
        before_s, self._put_s = self._put_s, time.perf_counter()
        if self._put_s - before_s > self._company_s or len(message.entries) >= _MAX_TOGETHER or message.room < nbytes:
            await self.flush()

    async def flush(self) -> None:
        """Send what was put."""
        message, self._message = self._message, None
        if message is None:
            return
        segment = message.segment
        where = None if segment is None else (segment.number, segment.nbytes, message.num_used)
        meta = pickle.dumps(
            (
                message.entries,
                where,
                self._retired(),
                max(1, min(len(self._waiting), self._prefetch_batches or _MAX_PREFETCH) // _TOLD_SHARE),
            )
        )
        if segment is None:
            await self._wire.send_async(BATCH, meta, [message.memory[: message.num_used]])
            return
        await self._wire.send_async(BATCH, meta, descriptors=[] if segment.announced else [segment.descriptor])
        segment.announce()

    def is_worth_it(self, num_rows: int) -> bool:
        """Return whether the last micro-batch had so many samples, large enough to be written where they will lie."""
        layout = self._layout
        return layout is not None and layout.nbytes <= self._max_reserved_bytes and bool(rooms_of(layout, num_rows))

    def reserve(self, num_rows: int) -> Reserved | None:
        """Return a segment for a micro-batch like the last one, if that is worth it."""
        if self._layout is None or not self.is_worth_it(num_rows):
            return None
        return self._reservations.reserve(self._layout.nbytes, num_rows, rooms_of(self._layout, num_rows))

    def _claim(self, layout: Layout, fields: Mapping[str, Any]) -> tuple[Segment, frozenset[str]] | None:
        """Return the segment that a micro-batch lies in already, and which of its fields do."""
        if not self._reservations.num_open or layout.nbytes <= self._inline_bytes:
            return None
        found = self._reservations.claim(layout, fields)
        if found is None:
            self.num_missed += 1
        else:
            self.num_placed += 1
        return found

    def _begin(self, nbytes: int) -> _Message:
        """Return an empty message, with room for as many micro-batches of a size as may go together."""
        number = min(_MAX_TOGETHER, self._prefetch_batches or _MAX_TOGETHER)
        if number * nbytes > self._inline_bytes and 4 * nbytes > self._inline_bytes:
            room = max(nbytes, min(number * nbytes, _TOGETHER_BYTES // nbytes * nbytes))
            if room > self._inline_bytes:
                segment = self._arena.take(room)
                return _Message(segment, segment.memory, room)
        room = max(nbytes, min(number * nbytes, self._inline_bytes))
        return _Message(None, memoryview(bytearray(room)), room)

    def take_back(self, num_taken: int, returned: list[int]) -> None:
        """Note that the trainer took micro-batches and returned segments."""
        for number in returned:
            self._reservations.give_back(number)
        for _ in range(num_taken):
            num_records, nbytes = self._waiting.popleft()
            self._waiting_bytes -= nbytes
            if self.budget is not None:
                self.budget.slots.deliver(num_records)
        if self.budget is not None:
            self.budget.changed()
        self._taken.notify()

    def close(self) -> None:
        """Let go of the shared memory; what the trainer views stays valid."""
        self._arena.close()

    def _retired(self) -> list[int]:
        retired, self._arena.retired = self._arena.retired, []
        if retired:
            self.on_retired(retired)
        return retired


def _ignore(_numbers: list[int]) -> None:
    """Tell nobody."""


class _Message:
    """Micro-batches that travel together."""

    __slots__ = ("entries", "memory", "num_used", "room", "segment")

    def __init__(self, segment: Segment | None, memory: memoryview, room: int) -> None:
        self.segment = segment
        self.memory = memory
        self.room = room
        self.num_used = 0
        self.entries: list[tuple[Any, ...]] = []


class Inbox:
    """The trainer's end: opens messages, and notes which shared memory came free.

    Attributes:
        told_every: After how many micro-batches the engine wants to hear that they were delivered.
    """

    def __init__(self, max_held_segments: int, lock: PageLock | None = None) -> None:
        self.told_every = 1
        self._views = SegmentViews(lock)
        self._layout: Layout | None = None
        self._max_held_segments = max_held_segments
        self._num_viewed = 0
        self._num_returned = 0
        self._returned: list[int] = []
        self._arrived: deque[tuple[tuple[Any, ...], Any]] = deque()
        """Micro-batches that are not opened yet, each with the memory of its message."""

    def __len__(self) -> int:
        return len(self._arrived)

    def add(self, frame: Frame) -> None:
        """Take the micro-batches of a BATCH frame. A segment too many for those held is copied, so that shared memory stays bounded."""
        entries, where, retired, self.told_every = pickle.loads(frame.meta)
        for number in retired:
            self._views.forget(number)
        memory: Any = frame.body
        if where is not None:
            number, segment_bytes, num_used = where
            if frame.descriptors:
                self._views.attach(number, frame.descriptors[0], segment_bytes)
            memory = self._views.view(number, num_used, self._returned.append)
            self._num_viewed += 1
            if self._num_viewed - self._num_returned - len(self._returned) > self._max_held_segments:
                memory = memory.copy()
        for entry in entries:
            self._arrived.append((entry, memory))

    def next(self) -> Delivered:
        """Return the next micro-batch, which must be there.

        Raises:
            BatchError: It has fields that cannot be loaded here.
        """
        (head, layout, others, records, state, offset), memory = self._arrived.popleft()
        if layout is None:
            layout = self._layout
        self._layout = layout
        memory = memory[offset : offset + layout.nbytes]
        return Delivered(head, layout, memory, _load_others(others) if others else {}, records, state)

    def take_returned(self) -> list[int]:
        """Return the segments that came free since the last call."""
        if not self._returned:
            return []
        returned = self._returned[:]
        del self._returned[: len(returned)]  # the same list goes on: views made earlier add to it when they are gone
        self._num_returned += len(returned)
        return returned

    def close(self) -> None:
        """Let go of the shared memory; what is viewed stays valid."""
        self._arrived.clear()
        self._views.close()


def _load_others(others: bytes) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = pickle.loads(others)
    except Exception as error:
        raise BatchError(
            f"the collator must return what can move to the trainer's process, got fields that cannot be loaded here: "
            f"{type(error).__name__}: {error}; return arrays, tensors or plain data"
        ) from error
    return fields


def _pack_others(fields: dict[str, Any], ready: Ready) -> bytes:
    """Return the fields that are no arrays as bytes; classes of the user's main module are known to cloudpickle only."""
    try:
        return pickle.dumps(fields, protocol=5)  # older ones change the byte order of arrays
    except Exception:  # noqa: BLE001 - a foreign __reduce__ may raise anything; tried again below
        pass
    try:
        return dumps(fields)
    except Exception as error:
        rows = ready.load_records()
        record, seq, _ = rows[0] if rows else (None, None, 0)
        raise BatchError(
            f"the collator must return what can move to the trainer's process, got fields {sorted(map(str, fields))} of micro-batch "
            f"{ready.step}, which cannot: {type(error).__name__}: {error}; return arrays, tensors or plain data",
            seq=seq,
            record=record,
            lane=ready.lane,
        ) from error
