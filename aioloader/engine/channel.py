"""The messages between the engine and the trainer, and a micro-batch as it arrives.

trainer -> engine    RUN (start a pass), TAKEN (so many micro-batches delivered, segments returned), STATS
engine -> trainer    BATCH (one micro-batch or several), END (the pass is over), ERROR (the pass failed), STATS

BATCH, see `outbox.py` and `inbox.py`, is a pickle beside its arrays, which lie in a segment of shared memory or, if small, in the message:

    message  = (entries, segment, retired segments, after how many deliveries the engine wants to hear of them)
    entry    = (head, layout, other fields, provenance, state, offset of its arrays)       layout None: that of the one before
    head     = (step, lane, epoch, tokens, padding, targets, samples, cause of waiting)
    segment  = (number, bytes, bytes used), None if the arrays are in the message
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

from aioloader.engine.layout import Layout
from aioloader.engine.output import list_records
from aioloader.protocols import Json, RecordId

__all__ = ["BATCH", "END", "ERROR", "RUN", "STATS", "TAKEN", "Delivered"]

RUN, TAKEN, STATS = 1, 2, 3
BATCH, END, ERROR = 11, 12, 13


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
