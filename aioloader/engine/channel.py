"""The messages between the engine and the trainer, and how a micro-batch crosses: arrays in shared memory, the rest in a message.

trainer -> engine    RUN (start a pass), TAKEN (micro-batches delivered, segments returned), STATS
engine -> trainer    BATCH, END (the pass is over), ERROR (the pass failed), STATS
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from aioloader.engine.output import Ready, TensorArray
from aioloader.errors import BatchError
from aioloader.protocols import Json, RecordId
from aioloader.runtime.budget import Budget
from aioloader.runtime.moving import dumps
from aioloader.runtime.segments import Arena, SegmentViews
from aioloader.runtime.signal import Signal
from aioloader.runtime.wire import Frame, Wire

__all__ = ["BATCH", "END", "ERROR", "RUN", "STATS", "TAKEN", "Delivered", "Outbox", "decode_batch"]

RUN, TAKEN, STATS = 1, 2, 3
BATCH, END, ERROR = 11, 12, 13

_INLINE_BYTES = 1 << 15  # below this a copy through the socket is cheaper than a segment's bookkeeping
_ALIGNMENT = 64


@dataclass(slots=True)
class Delivered:
    """A micro-batch on the trainer's side. Arrays view shared memory, which is reused once they are all gone."""

    fields: dict[str, Any]
    step: int
    lane: int
    epoch: int
    num_tokens: int
    num_padding: int
    num_targets: int
    _records: bytes
    _state: bytes

    def records(self) -> list[tuple[RecordId, int, int]]:
        """Return ((shard, row), seq, sub) of each sample."""
        records: list[tuple[RecordId, int, int]] = pickle.loads(self._records)
        return records

    def state(self) -> Json:
        """Return the rank's state as of this micro-batch."""
        return pickle.loads(self._state)


class Outbox:
    """The engine's end: sends micro-batches, never more than `prefetch_batches` ahead of the trainer."""

    def __init__(self, wire: Wire, prefetch_batches: int) -> None:
        self._wire = wire
        self._arena = Arena()
        self._prefetch_batches = prefetch_batches
        self._waiting: list[int] = []
        self._taken = Signal()
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

    async def put(self, ready: Ready) -> None:
        """Send one micro-batch.

        Raises:
            BatchError: The collator returned something that cannot move to the trainer.
        """
        arrays = {name: field for name, field in ready.fields.items() if isinstance(field, TensorArray)}
        others = _pack_others({name: field for name, field in ready.fields.items() if name not in arrays}, ready)
        table, nbytes = [], 0
        for name, field in arrays.items():
            table.append((name, field.dtype, field.array.dtype.str, field.array.shape, nbytes))
            nbytes += field.array.nbytes + -field.array.nbytes % _ALIGNMENT
        self._waiting.append(ready.num_records)
        segment = self._arena.take(nbytes) if nbytes > _INLINE_BYTES else None
        memory = segment.memory if segment else memoryview(bytearray(nbytes))
        for (_, _, _, _, at), field in zip(table, arrays.values(), strict=True):
            target = np.frombuffer(memory, np.uint8, field.array.nbytes, at).view(field.array.dtype)
            np.copyto(target.reshape(field.array.shape), field.array)
        meta = pickle.dumps(
            (
                (ready.step, ready.lane, ready.epoch, ready.num_tokens, ready.num_padding, ready.num_targets),
                list(ready.fields),
                table,
                others,
                pickle.dumps(ready.records),
                pickle.dumps(ready.state),
                None if segment is None else (segment.number, segment.nbytes, nbytes),
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
        if num_taken and self.budget is not None:
            for num_records in self._waiting[:num_taken]:
                self.budget.slots.deliver(num_records)
            self.budget.changed()
        del self._waiting[:num_taken]
        self._taken.notify()

    def close(self) -> None:
        """Let go of the shared memory; what the trainer views stays valid."""
        self._arena.close()

    def _retired(self) -> list[int]:
        retired, self._arena.retired = self._arena.retired, []
        return retired


def decode_batch(frame: Frame, views: SegmentViews, on_release: Callable[[int], None], *, copy: bool) -> Delivered:
    """Return the micro-batch of a BATCH frame; with `copy`, in private memory, and its segment is returned at once."""
    head, names, table, others, records, state, where, retired = pickle.loads(frame.meta)
    for number in retired:
        views.forget(number)
    memory: Any = frame.body
    if where is not None:
        number, segment_bytes, nbytes = where
        if frame.descriptors:
            views.attach(number, frame.descriptors[0], segment_bytes)
        memory = views.view(number, nbytes, on_release)
        if copy:
            memory = memory.copy()
    arrays = {name: TensorArray(_array(memory, dtype, shape, at), torch_dtype) for name, torch_dtype, dtype, shape, at in table}
    plain = pickle.loads(others)
    fields = {name: arrays[name] if name in arrays else plain[name] for name in names}
    step, lane, epoch, num_tokens, num_padding, num_targets = head
    return Delivered(fields, step, lane, epoch, num_tokens, num_padding, num_targets, records, state)


def _pack_others(fields: dict[str, Any], ready: Ready) -> bytes:
    """Return the fields that are no arrays as bytes; classes of the user's main module are known to cloudpickle only."""
    try:
        return pickle.dumps(fields, protocol=5)  # older ones change the byte order of arrays
    except Exception:  # noqa: BLE001 - a foreign __reduce__ may raise anything; tried again below
        pass
    try:
        return dumps(fields)
    except Exception as error:
        record, seq, _ = ready.records[0] if ready.records else (None, None, 0)
        raise BatchError(
            f"the collator must return what can move to the trainer's process, got fields {sorted(map(str, fields))} of micro-batch "
            f"{ready.step}, which cannot: {type(error).__name__}: {error}; return arrays, tensors or plain data",
            seq=seq,
            record=record,
            lane=ready.lane,
        ) from error


def _array(memory: Any, dtype: str, shape: tuple[int, ...], at: int) -> Any:
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(memory, kind, count, at).reshape(shape) if count else np.empty(shape, kind)
