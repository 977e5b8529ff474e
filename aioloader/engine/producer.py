"""The producer's arithmetic: which records of a span are ours and needed, and where a resumed run starts to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

from aioloader.engine.assembler import Place, Stamps
from aioloader.order.lanes import LaneMap
from aioloader.pools.chunk import Chunk
from aioloader.protocols import Batching, Cursor, Json, RecordId, Span
from aioloader.sequences import Chain, RowIds

__all__ = ["CursorLog", "Queue", "Stamper"]


class Queue:
    """Records that are read and stamped, waiting for a worker."""

    def __init__(self) -> None:
        self._lanes: list[int] = []
        self._seqs: list[int] = []
        self._records: list[Any] = []
        self._start = 0
        self._ids: deque[Sequence[RecordId]] = deque()

    def __len__(self) -> int:
        return len(self._records) - self._start

    def add(self, lane: int, seq: int, record_id: RecordId, record: Any) -> None:
        """Append one record."""
        self.extend(lane, (seq,), (record_id,), (record,))

    def extend(self, lane: int, seqs: Sequence[int], ids: Sequence[RecordId], records: Sequence[Any]) -> None:
        """Append records of one lane."""
        self._lanes.extend(repeat(lane, len(seqs)))
        self._seqs.extend(seqs)
        self._records.extend(records)
        self._ids.append(ids)

    def cut(self, epoch: int, max_records: int) -> tuple[Stamps, Chunk]:
        """Take the first `max_records` records or all there are, at least one."""
        part = slice(self._start, self._start + max_records)
        records = self._records[part]
        stamps = Stamps(self._lanes[part], self._seqs[part], _take(self._ids, len(records)))
        self._start += len(records)
        if self._start == len(self._records):
            for column in (self._lanes, self._seqs, self._records):
                column.clear()
            self._start = 0
        return stamps, Chunk(epoch, records, stamps.ids)


def _take(parts: deque[Sequence[RecordId]], number: int) -> Sequence[RecordId]:
    """Take the first `number` ids; as one range where they are one."""
    taken: list[Sequence[RecordId]] = []
    while number:
        part = parts.popleft()
        if len(part) > number:
            parts.appendleft(part[number:])
            part = part[:number]
        number -= len(part)
        joined = taken[-1].followed_by(part) if taken and isinstance(part, RowIds) and isinstance(taken[-1], RowIds) else None
        if joined is None:
            taken.append(part)
        else:
            taken[-1] = joined
    if len(taken) > 1 and not any(isinstance(part, RowIds) for part in taken):
        return [record for part in taken for record in part]
    return Chain.of(taken)


class Stamper:
    """Numbers the records of one epoch. Those of other ranks' lanes, and those delivered before a resume, are passed over.

    With `even`, the records of an incomplete last block of L positions are held back and dropped, so that all lanes get the
    same number of records.
    """

    def __init__(self, lanes: LaneMap, batching: Batching, state: Json, *, epoch: int, position: int, even: bool) -> None:
        self.position = position
        self._lanes = lanes
        self._even = even and lanes.num_lanes > 1
        self._from: dict[int, tuple[int, frozenset[int]]] = {}
        for lane in lanes.served:
            lane_state = state["lanes"][str(lane)]
            if lane_state["epoch"] < epoch:
                self._from[lane] = (0, frozenset())
            elif lane_state["epoch"] == epoch:
                refs = batching.start().refs(lane_state["batcher"])
                self._from[lane] = (lane_state["seq"], frozenset(seq for seq, _ in refs))
        self._only_lane = lanes.served[0] if len(lanes.served) == 1 else None
        self._all_from = 1 << 63
        """With one lane: the position from which every record of it is needed."""
        if self._only_lane in self._from:
            self._all_from = lanes.position(0, self._from[self._only_lane][0])
        self.held: list[tuple[int, int, RecordId, Any]] = []

    def stamp(self, span: Span, queue: Queue) -> int:
        """Add the records of `span` that this rank needs to `queue`; return how many records were passed over for good."""
        if self._only_lane is not None and self.position >= self._all_from:
            return self._stamp_lane(self._only_lane, span, queue)
        passed = 0
        for record, record_id in zip(span.records, span.ids, strict=True):
            lane, seq = self._lanes.locate(self.position)
            self.position += 1
            first, again = self._from.get(lane, (None, ()))
            if first is None or (seq < first and seq not in again):
                passed += 1
            elif self._even:
                self.held.append((lane, seq, record_id, record))
            else:
                queue.add(lane, seq, record_id, record)
            if self._even and self.position % self._lanes.num_lanes == 0:
                self.release(queue)
        return passed

    def _stamp_lane(self, lane: int, span: Span, queue: Queue) -> int:
        """Add every L-th record; of an incomplete last block it is held back, where that is asked for."""
        num_lanes = self._lanes.num_lanes
        part = slice((lane - self.position) % num_lanes, None, num_lanes)
        records, ids = (span.records, span.ids) if num_lanes == 1 else (span.records[part], span.ids[part])
        first_seq = (self.position + part.start) // num_lanes
        self.position += len(span.records)
        num_passed = len(span.records) - len(records)
        ready = len(records)
        if self._even:
            num_blocks = self.position // num_lanes
            if self.held and self.held[0][1] < num_blocks:
                self.release(queue)
            ready = min(ready, max(0, num_blocks - first_seq))
            self.held.extend((lane, first_seq + at, ids[at], records[at]) for at in range(ready, len(records)))
            records, ids = records[:ready], ids[:ready]
        if ready:
            queue.extend(lane, range(first_seq, first_seq + ready), ids, records)
        return num_passed

    def release(self, queue: Queue) -> int:
        """Add the records that were held back, also of an incomplete block: what comes before a failure is delivered. Return how many."""
        num_released = len(self.held)
        for row in self.held:
            queue.add(*row)
        self.held.clear()
        return num_released


class _Entry(NamedTuple):
    place: Place
    cursor: Cursor | None


class CursorLog:
    """The source's cursors at places where reading began; a state refers to the last one before what it needs."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()

    def add(self, place: Place, cursor: Cursor | None) -> None:
        """Note the cursor of the record at `place`; places rise. Without a cursor only the first record of an epoch is noted."""
        if cursor is not None or place[1] == 0:
            self._entries.append(_Entry(place, cursor))

    def before(self, place: Place) -> Json:
        """Return the last cursor at or before `place`, as it goes into a state; earlier ones are forgotten."""
        while len(self._entries) > 1 and self._entries[1].place <= place:
            self._entries.popleft()
        (epoch, position), cursor = self._entries[0]
        return {"epoch": epoch, "position": position, "cursor": cursor}
