"""The trainer's end of the channel: opens messages and notes which shared memory came free. The format is in `channel.py`."""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any

from aioloader.engine.channel import Delivered
from aioloader.engine.layout import Layout
from aioloader.errors import BatchError
from aioloader.runtime.segments import PageLock, SegmentViews
from aioloader.runtime.wire import Frame

__all__ = ["Inbox"]


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
        self._arrived: deque[tuple[tuple[Any, ...], Any, bool]] = deque()
        """Micro-batches that are not opened yet: entry, memory of the message, and whether to copy what is in it."""

    def __len__(self) -> int:
        return len(self._arrived)

    def add(self, frame: Frame) -> None:
        """Take the micro-batches of a BATCH frame. Those of a segment too many are copied, so that shared memory stays bounded."""
        entries, where, retired, self.told_every = pickle.loads(frame.meta)
        for number in retired:
            self._views.forget(number)
        memory: Any = frame.body
        is_copied = len(entries) > 1  # the trainer may keep one of many, and not the memory of all
        if where is not None:
            number, segment_bytes, num_used = where
            if frame.descriptors:
                self._views.attach(number, frame.descriptors[0], segment_bytes)
            memory = self._views.view(number, num_used, self._returned.append)
            self._num_viewed += 1
            is_copied = self._num_viewed - self._num_returned - len(self._returned) > self._max_held_segments
        for entry in entries:
            self._arrived.append((entry, memory, is_copied))

    def next(self) -> Delivered | None:
        """Return the next micro-batch, None if there is none.

        Raises:
            BatchError: It has fields that cannot be loaded here.
        """
        if not self._arrived:
            return None
        (head, layout, others, records, state, offset), memory, is_copied = self._arrived.popleft()
        if layout is None:
            layout = self._layout
        self._layout = layout
        if is_copied:
            memory, offset = memoryview(bytearray(memory[offset : offset + layout.nbytes])), 0
        return Delivered(head, layout, memory, offset, _load_others(others) if others else {}, records, state)

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
