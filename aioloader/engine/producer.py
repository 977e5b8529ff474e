"""The producer's arithmetic: which records of a span are ours and needed, and where a resumed run starts to read."""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import Any, NamedTuple

from aioloader.engine.assembler import Stamps
from aioloader.engine.lane import oldest_seq
from aioloader.order.lanes import LaneMap
from aioloader.pools.chunk import Chunk
from aioloader.protocols import Batching, Cursor, Json, RecordId, Span

__all__ = ["CursorLog", "Place", "Queue", "Stamper", "oldest_place"]

Place = tuple[int, int]
"""(epoch, position); places are ordered as the run goes through them."""


class Queue:
    """Records that are read and stamped, waiting for a worker."""

    def __init__(self) -> None:
        self._lanes: list[int] = []
        self._seqs: list[int] = []
        self._ids: list[RecordId] = []
        self._records: list[Any] = []
        self._start = 0

    def __len__(self) -> int:
        return len(self._records) - self._start

    def add(self, lane: int, seq: int, record_id: RecordId, record: Any) -> None:
        """Append one record."""
        self._lanes.append(lane)
        self._seqs.append(seq)
        self._ids.append(record_id)
        self._records.append(record)

    def extend(self, lane: int, first_seq: int, span: Span) -> None:
        """Append a whole span, all of one lane."""
        num_records = len(span.records)
        self._lanes.extend(repeat(lane, num_records))
        self._seqs.extend(range(first_seq, first_seq + num_records))
        self._ids.extend(span.ids)
        self._records.extend(span.records)

    def cut(self, epoch: int, max_records: int) -> tuple[Stamps, Chunk]:
        """Take the first `max_records` records or all there are, at least one."""
        part = slice(self._start, self._start + max_records)
        stamps = Stamps(self._lanes[part], self._seqs[part], self._ids[part])
        chunk = Chunk(epoch, self._records[part], stamps.ids)
        self._start += len(stamps.ids)
        if self._start == len(self._records):
            for column in (self._lanes, self._seqs, self._ids, self._records):
                column.clear()
            self._start = 0
        return stamps, chunk


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
        self._all_from = self._from[0][0] if lanes.num_lanes == 1 and 0 in self._from else 1 << 63
        """With one lane: the position from which every record is needed."""
        self.held: list[tuple[int, int, RecordId, Any]] = []

    def stamp(self, span: Span, queue: Queue) -> int:
        """Add the records of `span` that this rank needs to `queue`; return how many records were passed over for good."""
        if self._lanes.num_lanes == 1 and self.position >= self._all_from:
            queue.extend(0, self.position, span)
            self.position += len(span.records)
            return 0
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


def oldest_place(lanes: LaneMap, batching: Batching, lane_states: dict[str, Json]) -> Place:
    """Return the first record that a rank with these lane states needs again."""
    return min((state["epoch"], lanes.position(int(lane), oldest_seq(batching, state))) for lane, state in lane_states.items())
