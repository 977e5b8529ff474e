"""The messages between the engine and the trainer, and how a micro-batch crosses: arrays in shared memory, the rest in a message.

trainer -> engine    RUN (start a pass), TAKEN (micro-batches delivered, segments returned), STATS
engine -> trainer    BATCH, END (the pass is over), ERROR (the pass failed), STATS
"""

from __future__ import annotations

import functools
import math
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from aioloader.engine.output import Ready, TensorArray, list_records
from aioloader.errors import BatchError
from aioloader.protocols import Json, RecordId
from aioloader.runtime.budget import Budget
from aioloader.runtime.moving import dumps
from aioloader.runtime.segments import Arena, SegmentViews
from aioloader.runtime.signal import Signal
from aioloader.runtime.wire import Frame, Wire

__all__ = ["BATCH", "END", "ERROR", "RUN", "STATS", "TAKEN", "Delivered", "Field", "Inbox", "Layout", "Outbox"]

RUN, TAKEN, STATS = 1, 2, 3
BATCH, END, ERROR = 11, 12, 13

_INLINE_BYTES = 1 << 13  # below this a copy through the socket is cheaper than a segment's bookkeeping
_ALIGNMENT = 64


class Field(NamedTuple):
    """Where an array of a micro-batch lies: torch's and NumPy's name of its dtype, its shape, its offset in bytes."""

    name: str
    torch_dtype: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.shape)


class Layout:
    """The fields of a micro-batch; nearly always those of the one before, so it is sent and prepared once.

    Attributes:
        names: All fields, in order; those not in `arrays` are plain values.
        arrays: The fields that are arrays, each at a multiple of 64 bytes.
        nbytes: Of all arrays.
        prepared: For the bridge to keep what it made of this layout.
    """

    __slots__ = ("arrays", "names", "nbytes", "prepared")

    def __init__(self, names: tuple[str, ...], arrays: tuple[Field, ...], nbytes: int) -> None:
        self.names = names
        self.arrays = arrays
        self.nbytes = nbytes
        self.prepared: Any = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Layout:
        """Return the layout of a micro-batch."""
        arrays, nbytes = [], 0
        for name, field in fields.items():
            if isinstance(field, TensorArray):
                arrays.append(Field(name, field.dtype, field.pieces[0].dtype.str, field.shape, nbytes))
                nbytes += field.nbytes + -field.nbytes % _ALIGNMENT
        return cls(tuple(fields), tuple(arrays), nbytes)

    def fits(self, fields: Mapping[str, Any]) -> bool:
        """Return whether this is the layout of a micro-batch."""
        if self.names != tuple(fields):
            return False
        arrays = [field for field in fields.values() if type(field) is TensorArray]
        if len(arrays) != len(self.arrays):
            return False
        for field, array in zip(self.arrays, arrays, strict=True):
            if array is not fields[field.name] or field.shape != array.shape or field.torch_dtype != array.dtype:
                return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.names, self.arrays, self.nbytes)


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
        "num_targets",
        "num_tokens",
        "others",
        "step",
    )

    def __init__(self, head: tuple[int, ...], layout: Layout, memory: Any, others: dict[str, Any], records: bytes, state: bytes) -> None:
        self.step, self.lane, self.epoch, self.num_tokens, self.num_padding, self.num_targets, self.cause = head
        self.layout = layout
        self.memory = memory
        self.others = others
        self._records = records
        self._state = state

    def load_records(self) -> list[tuple[RecordId, int, int]]:
        """Return ((shard, row), seq, sub) of each sample."""
        return list_records(pickle.loads(self._records))

    def state_loader(self) -> Callable[[], Json]:
        """Return a function that returns what of the rank's state is new with this micro-batch, and keeps nothing else alive."""
        return functools.partial(pickle.loads, self._state)


class Outbox:
    """The engine's end: sends micro-batches, never more than `prefetch_batches` ahead of the trainer."""

    def __init__(self, wire: Wire, prefetch_batches: int, max_free_bytes: int = 1 << 28) -> None:
        self._wire = wire
        self._arena = Arena(max_free_bytes)
        self._prefetch_batches = prefetch_batches
        self._waiting: deque[tuple[int, int]] = deque()
        """Records and bytes of each micro-batch that was sent and not delivered yet."""
        self.waiting_bytes = 0
        self.batch_bytes = 0
        self._taken = Signal()
        self._layout: Layout | None = None
        self.budget: Budget | None = None

    @property
    def num_waiting(self) -> int:
        """Return the micro-batches sent and not yet delivered."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Return whether one more micro-batch may wait for the trainer."""
        return len(self._waiting) < self._prefetch_batches

    async def room(self) -> None:
        """Wait until one more micro-batch may wait for the trainer."""
        while not self.has_room:
            await self._taken.wait()

    async def put(self, ready: Ready, cause: int = 0) -> None:
        """Send one micro-batch, with what the engine was waiting for before it.

        Raises:
            BatchError: The collator returned something that cannot move to the trainer.
        """
        known = self._layout is not None and self._layout.fits(ready.fields)
        layout = self._layout if self._layout is not None and known else Layout.of(ready.fields)
        others = b""
        if len(layout.arrays) < len(layout.names):
            others = _pack_others({name: field for name, field in ready.fields.items() if not isinstance(field, TensorArray)}, ready)
        self._waiting.append((ready.num_records, layout.nbytes))
        self.waiting_bytes += layout.nbytes
        self.batch_bytes = layout.nbytes
        segment = self._arena.take(layout.nbytes) if layout.nbytes > _INLINE_BYTES else None
        memory = segment.memory if segment else memoryview(bytearray(layout.nbytes))
        for field in layout.arrays:
            target = (
                np.frombuffer(memory, field.dtype, field.num_elements, field.offset) if field.num_elements else np.empty(0, field.dtype)
            )
            ready.fields[field.name].write(target.reshape(field.shape))
        self._layout = layout
        meta = pickle.dumps(
            (
                (ready.step, ready.lane, ready.epoch, ready.num_tokens, ready.num_padding, ready.num_targets, cause),
                None if known else layout,
                others,
                pickle.dumps(ready.provenance),
                pickle.dumps(ready.state),
                None if segment is None else (segment.number, segment.nbytes),
                self._retired(),
            )
        )
        if segment is None:
            await self._wire.send_async(BATCH, meta, [memory])
            return
        await self._wire.send_async(BATCH, meta, descriptors=[] if segment.announced else [segment.descriptor])
        segment.announce()

    def take_back(self, num_taken: int, returned: list[int]) -> None:
        """Note that the trainer took micro-batches and returned segments."""
        for number in returned:
            self._arena.give_back(number)
        for _ in range(num_taken):
            num_records, nbytes = self._waiting.popleft()
            self.waiting_bytes -= nbytes
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
        return retired


class Inbox:
    """The trainer's end: opens micro-batches, and notes which shared memory came free."""

    def __init__(self, max_held_segments: int) -> None:
        self._views = SegmentViews()
        self._layout: Layout | None = None
        self._max_held_segments = max_held_segments
        self._num_viewed = 0
        self._num_returned = 0
        self._returned: list[int] = []

    def open(self, frame: Frame) -> Delivered:
        """Return the micro-batch of a BATCH frame. One too many for those held is copied, so that shared memory stays bounded."""
        head, layout, others, records, state, where, retired = pickle.loads(frame.meta)
        for number in retired:
            self._views.forget(number)
        if layout is None:
            layout = self._layout
        self._layout = layout
        memory: Any = frame.body
        if where is not None:
            number, segment_bytes = where
            if frame.descriptors:
                self._views.attach(number, frame.descriptors[0], segment_bytes)
            memory = self._views.view(number, layout.nbytes, self._returned.append)
            self._num_viewed += 1
            if self._num_viewed - self._num_returned - len(self._returned) > self._max_held_segments:
                memory = memory.copy()
        return Delivered(head, layout, memory, pickle.loads(others) if others else {}, records, state)

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
        self._views.close()


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
