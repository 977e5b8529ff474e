"""What travels between the engine and a pool: chunks of records out, blocks of samples back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from aioloader.errors import AioLoaderError
from aioloader.faults import Quarantine
from aioloader.protocols import Record, RecordId, Sample

__all__ = ["Block", "Chunk", "Destination", "Failure", "Outcome", "Quarantined", "Room"]


Room = tuple[str, tuple[int, ...], int]
"""Where the values of one field go: the dtype and shape of each, and the offset of the first, the others right after it."""


class Destination(NamedTuple):
    """Rows of a micro-batch to be, in shared memory, for a worker to write samples to straight away.

    A hint: samples of another number, kind or shape travel as any others do, and are copied to where they belong.

    Attributes:
        number: Of the segment.
        nbytes: Of the segment.
        rooms: Of the fields that have one.
        num_rows: How many samples it is for.
        descriptor: Of the segment, valid as long as `memory` is referred to.
        memory: uint8[nbytes], the engine's own view; keeps the segment from being used for anything else.
    """

    number: int
    nbytes: int
    rooms: dict[str, Room]
    num_rows: int
    descriptor: int
    memory: Any


class Chunk(NamedTuple):
    """Records to preprocess together. How records are cut into chunks never changes a result.

    Attributes:
        epoch: Seeds, with each id, the random number generators of a record.
        records: The records.
        ids: Their ids.
        destination: Where their samples go, if that is known.
        raw_nbytes: What the records take in memory.
        max_bytes: Once the samples take more than this, the records after them are left for another chunk; None: they never are.
    """

    epoch: int
    records: Sequence[Record]
    ids: Sequence[RecordId]
    destination: Destination | None = None
    raw_nbytes: int = 0
    max_bytes: int | None = None

    def split(self, number: int) -> tuple[Chunk, Chunk]:
        """Return the first records and the others; what takes up a part of its destination only has none."""
        raw_nbytes = self.raw_nbytes * number // max(1, len(self.records))
        first = self._replace(records=self.records[:number], ids=self.ids[:number], destination=None, raw_nbytes=raw_nbytes)
        rest = self._replace(
            records=self.records[number:], ids=self.ids[number:], destination=None, raw_nbytes=self.raw_nbytes - raw_nbytes
        )
        return first, rest


class Failure(NamedTuple):
    """An exception on its way to the trainer: the object where it can be moved, its text in any case.

    `kinds` are the names of its class and of the classes that this inherits from, nearest first.
    """

    kind: str
    message: str
    traceback: str
    error: BaseException | None
    kinds: tuple[str, ...]


class Quarantined(NamedTuple):
    """A record that was left out: its index, why (None: known from before), and the policy that said so."""

    record_index: int
    error: AioLoaderError | None
    quarantine: Quarantine | None


class Outcome(NamedTuple):
    """What a chunk became, in record order, up to the first record that failed, or the one after which the samples took too much.

    `counts` holds the number of samples of each record that was done (0: filtered or quarantined), or None when each gave exactly one.
    """

    num_done: int
    counts: Sequence[int] | None
    samples: Sequence[Sample]
    failure: Failure | None
    quarantined: Sequence[Quarantined] = ()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Block:
    """An outcome with what it cost: seconds in the worker of that name, bytes of the result, bytes on their way of the records done.

    `parts` are the blocks that it was made of: what their samples hold is counted for as long as they are there.
    """

    outcome: Outcome
    worker: str
    service_s: float
    nbytes: int = 0
    raw_nbytes: int = 0
    parts: Sequence[Block] = ()

    def with_failure(self, failure: Failure | None) -> Block:
        """Return the same block with another failure, or none."""
        return replace(self, outcome=self.outcome._replace(failure=failure), parts=(self,))
