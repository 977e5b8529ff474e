"""The engine's end of the channel: arrays go to shared memory, the rest to a message. The format is in `channel.py`.

Large arrays may lie there already, written by the workers; see `reservations.py`.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aioloader.engine.channel import BATCH, ERROR
from aioloader.engine.layout import Layout
from aioloader.engine.output import Ready, TensorArray
from aioloader.engine.placement import Reserved
from aioloader.engine.reservations import Reservations, rooms_of
from aioloader.errors import AioLoaderError, BatchError
from aioloader.runtime.budget import Budget
from aioloader.runtime.moving import dumps, pack_error
from aioloader.runtime.segments import Arena, Segment
from aioloader.runtime.signal import Signal
from aioloader.runtime.wire import Wire, WireClosedError

__all__ = ["INLINE_BYTES", "Outbox"]

INLINE_BYTES = 1 << 13  # below this a copy through the socket is cheaper than a segment's bookkeeping
_SMALL_SHARE = 4  # of INLINE_BYTES: larger ones go to a segment if others may come along, since one each would be a message each
_MAX_TOGETHER = 16  # a message costs about 60 us on both sides together, and a micro-batch 150: more of them save little
_TOGETHER_BYTES = 1 << 18  # a trainer that keeps one micro-batch of a message keeps the memory of all
_MIN_PREFETCH, _MAX_PREFETCH = 2, 16  # the second is what hides 16 wake-ups of 60 us behind one
_MAX_PREFETCH_BYTES = 1 << 20
_PREFETCH_SHARE = 8  # of the memory kept for reuse, which is an eighth of the memory limit
_TOLD_SHARE = 2  # of the micro-batches that wait: so many deliveries are worth a message, which wakes the engine


class Outbox:
    """The engine's end: sends micro-batches, several in one message where they are small and ready together.

    Never more than `prefetch_batches` of them wait for the trainer. None: two, and more where they are small: up to 16, as long as
    they take less than 1 MiB (and a 64th of the memory limit) and half of the records in flight.
    """

    def __init__(
        self,
        wire: Wire,
        prefetch_batches: int | None,
        *,
        max_free_bytes: int = 1 << 28,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        self._wire = wire
        self._inline_bytes = inline_bytes
        self._arena = Arena(max_free_bytes, keeps_descriptors=True)
        self._max_reserved_bytes = 2 * max_free_bytes
        self._prefetch_batches = prefetch_batches
        self._prefetch_bytes = min(_MAX_PREFETCH_BYTES, max_free_bytes // _PREFETCH_SHARE)
        self._together_bytes = min(_TOGETHER_BYTES, self._prefetch_bytes)
        self._waiting: deque[tuple[int, int]] = deque()
        """Records and bytes of each micro-batch that was put and not delivered yet."""
        self._batch_bytes = 0
        self.num_placed = 0
        self.num_missed = 0
        self._waiting_bytes = 0
        self._reservations = Reservations(self._arena)
        self.on_retired: Callable[[list[int]], None] = _ignore
        """Told of segments that are given back to the system, which may have been reserved before."""
        self._taken = Signal()
        self._layout: Layout | None = None
        self._message: _Message | None = None
        self.budget: Budget | None = None

    @property
    def num_waiting(self) -> int:
        """Return the micro-batches put and not yet delivered."""
        return len(self._waiting)

    @property
    def num_kept(self) -> int:
        """Return the micro-batches that wait for the rest of their message."""
        return 0 if self._message is None else len(self._message.entries)

    @property
    def has_room(self) -> bool:
        """Return whether one more micro-batch may wait for the trainer."""
        number = len(self._waiting)
        if self._prefetch_batches is not None:
            return number < self._prefetch_batches
        if number < _MIN_PREFETCH:
            return True
        if number >= _MAX_PREFETCH or self._waiting_bytes + self._batch_bytes > self._prefetch_bytes:
            return False
        return self.budget is None or not self.budget.slots.is_mostly_ready

    @property
    def headroom_bytes(self) -> int:
        """Return the bytes of the micro-batches that may be copied out of results which are still held."""
        return self._batch_bytes if self._prefetch_batches is not None else max(self._batch_bytes, self._prefetch_bytes)

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

    async def delivery(self) -> None:
        """Wait until the trainer has taken one of those that wait."""
        number = len(self._waiting)
        await self.flush()
        while len(self._waiting) >= number:
            await self._taken.wait()

    async def put(self, ready: Ready) -> None:
        """Load one micro-batch. It leaves when the message is full, or with `flush`.

        Raises:
            BatchError: The collator returned something that cannot move to the trainer.
        """
        known = self._layout is not None and self._layout.fits(ready.fields)
        layout = self._layout if self._layout is not None and known else Layout.of(ready.fields)
        others = _others_of(ready, layout)
        message, placed = await self._message_for(layout, ready.fields)
        self._waiting.append((ready.num_records, layout.nbytes))
        self._waiting_bytes += layout.nbytes
        self._batch_bytes = layout.nbytes
        for field in layout.arrays:
            if field.num_elements and field.name not in placed:
                target = np.ndarray(field.shape, field.dtype, message.memory, message.num_used + field.offset)
                ready.fields[field.name].write(target)
        self._layout = layout
        records, state = pickle.dumps(ready.provenance), pickle.dumps(ready.state)
        message.add((ready.head, None if known else layout, others, records, state, message.num_used), layout.nbytes)
        if len(message.entries) >= _MAX_TOGETHER or message.room < layout.nbytes:
            await self.flush()

    async def flush(self) -> None:
        """Send what was put."""
        message, self._message = self._message, None
        if message is None:
            return
        await self._wire.send_async(BATCH, *self._packed(message, self._retired()))
        if message.segment is not None:
            message.segment.announce()

    def abort(self, error: AioLoaderError) -> None:
        """Send what was put, then what ends the pass, and nothing after it. For another thread, while that of the engine stands still.

        Should that one go on in the meantime, what it puts is lost, and sending fails with `WireClosedError` from then on.
        """
        with contextlib.suppress(WireClosedError), self._wire.ending():
            message, self._message = self._message, None
            if message is not None:
                self._wire.send(BATCH, *self._packed(message, []))
            self._wire.send(ERROR, pack_error(error))

    def _packed(self, message: _Message, retired: list[int]) -> tuple[bytes, list[memoryview], list[int]]:
        """Return a message as meta, body and descriptors of a frame."""
        segment, entries = message.segment, message.entries[:]  # before the bytes that they take are counted
        where = None if segment is None else (segment.number, segment.nbytes, message.num_used)
        told_every = max(1, min(len(self._waiting), self._prefetch_batches or _MAX_PREFETCH) // _TOLD_SHARE)
        meta = pickle.dumps((entries, where, retired, told_every))
        if segment is None:
            return meta, [message.memory[: message.num_used]], []
        return meta, [], [] if segment.announced else [segment.descriptor]

    def is_worth_it(self, num_rows: int) -> bool:
        """Return whether the last micro-batch had so many samples, large enough to be written where they will lie."""
        layout = self._layout
        return layout is not None and layout.nbytes <= self._max_reserved_bytes and bool(rooms_of(layout, num_rows))

    def reserve(self, num_rows: int) -> Reserved | None:
        """Return a segment for a micro-batch like the last one, if that is worth it."""
        if self._layout is None or not self.is_worth_it(num_rows):
            return None
        return self._reservations.reserve(self._layout.nbytes, num_rows, rooms_of(self._layout, num_rows))

    async def _message_for(self, layout: Layout, fields: Mapping[str, Any]) -> tuple[_Message, frozenset[str]]:
        """Return the message that a micro-batch goes into, and which of its fields lie there already."""
        if self._reservations.num_open and layout.nbytes > self._inline_bytes:
            claimed = self._reservations.claim(layout, fields)
            if claimed is not None:
                self.num_placed += 1
                await self.flush()
                segment, placed = claimed
                self._message = _Message(segment, segment.memory, layout.nbytes)
                return self._message, placed
            self.num_missed += 1
        if self._message is None or self._message.room < layout.nbytes:
            await self.flush()
            self._message = self._begin(layout.nbytes)
        return self._message, frozenset()

    def _begin(self, nbytes: int) -> _Message:
        """Return an empty message, with room for as many micro-batches of a size as may go together."""
        number = min(_MAX_TOGETHER, self._prefetch_batches or _MAX_TOGETHER)
        if _SMALL_SHARE * nbytes <= self._inline_bytes or number * nbytes <= self._inline_bytes:
            together_bytes = self._inline_bytes
        else:
            together_bytes = self._together_bytes
        room = nbytes * max(1, min(number, together_bytes // max(1, nbytes)))
        if room <= self._inline_bytes:
            return _Message(None, memoryview(bytearray(room)), room)
        segment = self._arena.take(room)
        return _Message(segment, segment.memory, room)

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

    def add(self, entry: tuple[Any, ...], nbytes: int) -> None:
        self.num_used += nbytes
        self.room -= nbytes
        self.entries.append(entry)  # last, as `abort` may look at any time


def _others_of(ready: Ready, layout: Layout) -> bytes:
    """Return the fields that are no arrays as bytes, none if there are none."""
    if len(layout.arrays) == len(layout.names):
        return b""
    return _pack_others({name: field for name, field in ready.fields.items() if not isinstance(field, TensorArray)}, ready)


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
