"""The producer's arithmetic: which records of a span are ours and needed, and where a resumed run starts to read."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aioloader.engine.assembler import Place, Stamps
from aioloader.order.lanes import LaneMap
from aioloader.pools.chunk import Chunk
from aioloader.protocols import Batching, Cursor, DealtSource, Json, RecordId, Span
from aioloader.sequences import Chain, RowIds, followed_by

if TYPE_CHECKING:
    from aioloader.engine.plan import Plan

__all__ = ["CursorLog", "Queue", "Stamper"]

T = TypeVar("T")

_UNBOUNDED = 1 << 63


class Queue:
    """Records that are read and stamped, waiting for a worker."""

    def __init__(self) -> None:
        self._lanes: list[int] = []
        self._records: list[Any] = []
        self._nbytes: list[int] = []
        self.nbytes = 0
        self._start = 0
        self._seqs: deque[Sequence[int]] = deque()
        self._ids: deque[Sequence[RecordId]] = deque()

    def __len__(self) -> int:
        return len(self._records) - self._start

    def extend(
        self, lanes: Sequence[int], seqs: Sequence[int], ids: Sequence[RecordId], records: Sequence[Any], sizes: Sequence[int] | None = None
    ) -> None:
        """Append records, which take so many bytes."""
        self._lanes.extend(lanes)
        self._records.extend(records)
        self._nbytes.extend(repeat(0, len(records)) if sizes is None else sizes)
        self.nbytes += sum(sizes or ())
        self._seqs.append(seqs)
        self._ids.append(ids)

    def cut(self, epoch: int, max_records: int, max_bytes: int = _UNBOUNDED) -> tuple[Stamps, Chunk]:
        """Take the first `max_records` records or all there are, as long as they take no more than `max_bytes`; at least one."""
        sizes = self._nbytes[self._start : self._start + max_records]
        nbytes = sum(sizes)
        if nbytes > max_bytes:
            del sizes[max(1, bisect_right(list(accumulate(sizes)), max_bytes)) :]
            nbytes = sum(sizes)
        part = slice(self._start, self._start + len(sizes))
        records = self._records[part]
        number = len(records)
        stamps = Stamps(self._lanes[part], _take(self._seqs, number), _take(self._ids, number))
        self._records[part] = repeat(None, number)  # behind busy workers the queue is never empty, and would keep all that was ever read
        self._start += number
        self.nbytes -= nbytes
        if 2 * self._start >= len(self._records):
            for column in (self._lanes, self._records, self._nbytes):
                del column[: self._start]
            self._start = 0
        return stamps, Chunk(epoch, records, stamps.ids, raw_nbytes=nbytes)


def _take(parts: deque[Sequence[T]], number: int) -> Sequence[T]:
    """Take the first `number` ids or seqs; as one range where they are one."""
    taken: list[Sequence[T]] = []
    while number:
        part = parts.popleft()
        if len(part) > number:
            parts.appendleft(part[number:])
            part = part[:number]
        number -= len(part)
        joined = followed_by(taken[-1], part) if taken else None
        if joined is None:
            taken.append(part)
        else:
            taken[-1] = joined
    if len(taken) > 1 and not any(isinstance(part, RowIds) for part in taken):
        return [one for part in taken for one in part]
    return Chain.of(taken)


class Stamper:
    """Numbers the records of one epoch. Those of other ranks' lanes, and those delivered before a resume, are passed over.

    The records of a rank are those of every D-th position; its lanes take them in turn. With `even`, the records of an incomplete
    last block of L positions are held back and dropped, so that all lanes get the same number of records.

    Args:
        is_dealt: The spans hold this rank's records only.
    """

    def __init__(
        self, lanes: LaneMap, batching: Batching, state: Json, *, epoch: int, position: int, even: bool, is_dealt: bool = False
    ) -> None:
        self.position = position
        self._lanes = lanes
        self._served = list(lanes.served)
        self._share = lanes.share
        self._even = even and lanes.num_lanes > 1
        self._is_dealt = is_dealt
        self._from: dict[int, tuple[int, frozenset[int]]] = {}
        for lane in self._served:
            lane_state = state["lanes"][str(lane)]
            if lane_state["epoch"] < epoch:
                self._from[lane] = (0, frozenset())
            elif lane_state["epoch"] == epoch:
                refs = batching.start().refs(lane_state["batcher"])
                self._from[lane] = (lane_state["seq"], frozenset(seq for seq, _ in refs))
        self._all_from = 1 << 63
        """The position from which every record of the rank is needed."""
        if len(self._from) == len(self._served):
            self._all_from = max(seq for seq, _ in self._from.values()) * lanes.num_lanes
        self.held: list[tuple[int, int, RecordId, Any, int]] = []

    @classmethod
    def of(cls, plan: Plan, state: Json, epoch: int, position: int) -> Stamper:
        """Return the stamper of a plan for the rest of an epoch, from `position` on."""
        is_dealt = isinstance(plan.source, DealtSource)
        return cls(plan.lanes, plan.batching, state, epoch=epoch, position=position, even=not plan.keep_partial, is_dealt=is_dealt)

    def stamp(self, span: Span, queue: Queue, sizes: Sequence[int] | None = None) -> int:
        """Add the records of `span`, which take so many bytes, to `queue` if this rank needs them; return how many it does not."""
        first = self._share.first_from(self.position)
        records, ids = span.records, span.ids
        sizes = [0] * len(records) if sizes is None else sizes
        if not self._is_dealt and self._share.count > 1:
            part = slice(first - self.position, None, self._share.count)
            records, ids, sizes = records[part], ids[part], sizes[part]
        first_needed = self.position
        self.position += span.num_positions
        if records and first_needed < self._all_from:
            at, numbers = self._needed(first, len(records))
            records, ids, sizes = [records[one] for one in at], [ids[one] for one in at], [sizes[one] for one in at]
        else:
            numbers = self._numbers(first, len(records))
        self._add(numbers, ids, records, sizes, queue)
        return len(span.records) - len(records)

    def _numbers(self, first: int, num_records: int) -> tuple[list[int], Sequence[int]]:
        """Return the lane and the seq of records of every D-th position from `first` on."""
        index, num_served = first // self._share.count, len(self._served)
        if num_served == 1:
            return self._served * num_records, range(index, index + num_records)
        at = index % num_served
        lanes = self._served[at:] + self._served * (num_records // num_served + 1)
        return lanes[:num_records], [number // num_served for number in range(index, index + num_records)]

    def _needed(self, first: int, num_records: int) -> tuple[list[int], tuple[list[int], Sequence[int]]]:
        """Return which records were not delivered before a resume, or are in a saved buffer, and their numbers."""
        lanes, seqs = self._numbers(first, num_records)
        needed = [at for at in range(num_records) if self._is_needed(lanes[at], seqs[at])]
        return needed, ([lanes[at] for at in needed], [seqs[at] for at in needed])

    def _is_needed(self, lane: int, seq: int) -> bool:
        first, again = self._from.get(lane, (None, frozenset()))
        return first is not None and (seq >= first or seq in again)

    def _add(
        self,
        numbers: tuple[list[int], Sequence[int]],
        ids: Sequence[RecordId],
        records: Sequence[Any],
        sizes: Sequence[int],
        queue: Queue,
    ) -> None:
        """Queue what is in complete blocks and hold the rest back, where that is asked for."""
        lanes, seqs = numbers
        ready = len(records)
        if self._even:
            num_blocks = self.position // self._lanes.num_lanes
            if self.held and self.held[0][1] < num_blocks:
                self.release(queue)
            ready = bisect_left(seqs, num_blocks)
            rest = slice(ready, None)
            self.held.extend(zip(lanes[rest], seqs[rest], ids[rest], records[rest], sizes[rest], strict=True))
        if ready:
            queue.extend(lanes[:ready], seqs[:ready], ids[:ready], records[:ready], sizes[:ready])

    def release(self, queue: Queue) -> int:
        """Add the records that were held back, also of an incomplete block: what comes before a failure is delivered. Return how many."""
        num_released = len(self.held)
        for lane, seq, record_id, record, nbytes in self.held:
            queue.extend((lane,), (seq,), (record_id,), (record,), (nbytes,))
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
