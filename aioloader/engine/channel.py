"""The messages between the engine and the trainer, and a micro-batch as it arrives.

trainer -> engine    RUN (start a pass), TAKEN (so many micro-batches delivered, segments returned), STATS
engine -> trainer    BATCH (one micro-batch or several), END (the pass is over), ERROR (the pass failed), STATS

BATCH, see `outbox.py` and `inbox.py`, is a pickle beside its arrays, which lie in a segment of shared memory or, if small, in the message:

    message  = (entries, segment, retired segments, after how many deliveries the engine wants to hear of them)
    entry    = (head, layout, other fields, provenance, state, offset of its arrays)       layout None: that of the one before
    head     = `Ready.head`
    segment  = (number, bytes, bytes used), None if the arrays are in the message
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

from aioloader.engine.layout import Layout
from aioloader.engine.output import Head, list_records
from aioloader.protocols import Json, RecordId

__all__ = ["BATCH", "END", "ERROR", "RUN", "STATS", "TAKEN", "Delivered"]

RUN, TAKEN, STATS = 1, 2, 3
BATCH, END, ERROR = 11, 12, 13


class Delivered:
    """A micro-batch on the trainer's side. Its arrays lie in shared memory, which is reused once they are all gone.

    Attributes:
        head: See `Ready.head`.
        layout: Where the arrays lie, counted from `offset`.
        memory: Writable bytes, or uint8 on a device.
        offset: Where in them the arrays of this micro-batch begin.
        others: The fields that are no arrays, by name.
    """

    __slots__ = ("_records", "_state", "head", "layout", "memory", "offset", "others")

    def __init__(self, head: Head, layout: Layout, memory: Any, offset: int, others: dict[str, Any], records: bytes, state: bytes) -> None:
        self.head = head
        self.layout = layout
        self.memory = memory
        self.offset = offset
        self.others = others
        self._records = records
        self._state = state

    @property
    def cause(self) -> int:
        """Return what the engine was waiting for before it; an index into `telemetry.waits.CAUSES`."""
        return self.head[-1]

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

    def let_go(self) -> None:
        """Let go of the fields, which others hold now; a copy of the batch on another device must not keep them alive."""
        self.memory, self.others = None, {}
