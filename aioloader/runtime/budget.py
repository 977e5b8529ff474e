"""The in-flight budget: how many records, and how many bytes, may be between the upstream and the trainer at once.

    acquire (producer)  ->  working  ->  open (in a micro-batch that is not complete)  ->  ready  ->  release (delivery)

A slot belongs to the work and comes back at delivery, not at completion: released at completion, one slow record would let
the ordered heap grow without bound.
"""

from __future__ import annotations

from collections.abc import Callable

from aioloader.runtime.signal import Signal

__all__ = ["Budget", "Slots"]

_FORGETTING = 0.95
"""Per chunk: how fast a large record is forgotten."""
_UNMEASURED_RECORDS = 4
"""Records in work until the first result shows how large they are."""


class Slots:
    """The arithmetic of the budget, without waiting."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reserved = 0
        """Kept free for one micro-batch that is not in memory and comes back."""
        self.working = 0
        self.open = 0
        self.ready = 0
        self.peak = 0

    @property
    def in_flight(self) -> int:
        """Return the records started and not yet delivered."""
        return self.working + self.open + self.ready

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is being worked on and nothing waits for the trainer."""
        return self.working == 0 and self.ready == 0

    def free(self) -> int:
        """Return how many records may start now.

        1. Within the limit: the rest of it, but for what is reserved.
        2. Above it only so far as a micro-batch needs more records than the limit to become complete: then nothing is ready,
           and either nothing is working or the open records alone exceed the limit.
        """
        if self.in_flight < self.limit - self.reserved:
            return self.limit - self.reserved - self.in_flight
        starving = self.ready == 0 and (self.working == 0 or self.open >= self.limit)
        return max(0, self.limit - self.working) if starving else 0

    def start(self, num_records: int) -> None:
        """Count records that the producer takes."""
        self.working += num_records

    def note_peak(self) -> None:
        """Note how much is in flight if it is more than ever."""
        self.peak = max(self.peak, self.in_flight)

    def drop(self, num_records: int) -> None:
        """Uncount records that turned out not to be there, not to be ours, or to yield nothing."""
        self.working -= num_records

    def hold(self, num_records: int = 1) -> None:
        """Move records from working to open."""
        self.working -= num_records
        self.open += num_records

    def complete(self, num_records: int) -> None:
        """Move records from open to ready: their micro-batch can be delivered."""
        self.open -= num_records
        self.ready += num_records

    def discard(self, num_records: int) -> None:
        """Uncount open records whose incomplete micro-batch is dropped."""
        self.open -= num_records

    def put_aside(self, num_records: int) -> None:
        """Uncount open records that leave memory for a while."""
        self.open -= num_records
        self.reserved = max(self.reserved, min(num_records, self.limit // 2))

    def has_room_for(self, num_records: int) -> bool:
        """Return whether so many may come back within the limit."""
        return self.in_flight + num_records <= self.limit

    def bring_back(self, num_records: int) -> None:
        """Count records again that were put aside: their micro-batch can be delivered."""
        self.ready += num_records

    def is_crowded(self, num_records: int) -> bool:
        """Return whether so many of the records in flight leave less than half of the limit to the others."""
        return 2 * num_records > self.limit

    @property
    def is_mostly_ready(self) -> bool:
        """Return whether those that wait for the trainer take half of the limit: the others need the rest to stay at work."""
        return 2 * self.ready > self.limit

    def deliver(self, num_records: int) -> None:
        """Uncount records of a delivered micro-batch."""
        self.ready -= num_records


class Budget:
    """`Slots` that the producer can wait on, and the bytes of what is in flight.

    Bytes are counted where they lie (`held_bytes`: results in shared memory and batches that wait for the trainer). Records
    whose results are not there yet are counted as what the last ones took, so that the limit is kept when they come.

    Attributes:
        limit_bytes: Records are started only while what is in flight, with what they are expected to take, is within this;
            None: however large they are.
        headroom_bytes: Kept free for what is copied before the original is let go: a micro-batch.
        num_finished: Of the records that count as working, those whose results `held_bytes` counts already.
    """

    def __init__(self, limit: int, limit_bytes: int | None = None, held_bytes: Callable[[], int] = lambda: 0) -> None:
        self.slots = Slots(limit)
        self.limit_bytes = limit_bytes
        self.headroom_bytes = 0
        self.num_finished = 0
        self.peak_bytes = 0
        self._held_bytes = held_bytes
        self._raw_bytes = 0.0
        self._made_bytes = 0.0
        self._is_measured = False
        self._wanted = 1
        self._changed = Signal()

    @property
    def in_flight_bytes(self) -> int:
        """Return the bytes of raw records, finished results and waiting batches."""
        return self._held_bytes() + int(self._num_unfinished * self._raw_bytes)

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of finished results and waiting batches."""
        return self._held_bytes()

    def observe(self, num_records: int, raw_bytes: int, made_bytes: int) -> None:
        """Learn what records took, on their way to a worker and as results."""
        if num_records:
            self._raw_bytes = max(raw_bytes / num_records, self._raw_bytes * _FORGETTING)
            self._made_bytes = max(made_bytes / num_records, self._made_bytes * _FORGETTING)
            if not self._is_measured:
                self._is_measured = True
                self._changed.notify()
        self.note_peaks()

    def note_peaks(self) -> None:
        """Note how much is in flight if it is more than ever."""
        self.slots.note_peak()
        in_flight = self.in_flight_bytes
        if in_flight > self.peak_bytes:
            self.peak_bytes = in_flight

    def estimated_bytes(self, num_records: int) -> int:
        """Return what the results of so many records take, by the size of the last ones."""
        return int(num_records * self._made_bytes)

    def is_crowded(self, num_records: int) -> bool:
        """Return whether so many of the records in flight had better wait elsewhere.

        They are more than half of the records, or an eighth of the bytes where all is more than half: what a block of results holds
        besides them is held for as long as they are.
        """
        if not num_records:
            return False
        if self.slots.is_crowded(num_records):
            return True
        limit = self.limit_bytes
        return limit is not None and 8 * self.estimated_bytes(num_records) > limit and 2 * self._held_bytes() > limit

    async def acquire(self, max_records: int) -> int:
        """Wait until records may start and take up to `max_records`; return how many.

        Slots that come back one by one are gathered until they are worth a read, as long as others have work.
        """
        self._wanted = max_records
        while not self._has_enough():
            await self._changed.wait()
        taken = min(self._free(), max_records)
        self.slots.start(taken)
        return taken

    def changed(self) -> None:
        """Wake the producer after slots or bytes were moved or given back, if what it waits for is there."""
        if self._changed.has_waiters and self._has_enough():
            self._changed.notify()

    def _has_enough(self) -> bool:
        """Return whether the records that may start are worth a read, or are all that there will be."""
        free = self._free()
        enough = min(self._wanted, max(1, min(self.slots.limit, self._most()) // 4))  # both may change meanwhile
        return free >= enough or (free > 0 and self.slots.is_idle)

    @property
    def _num_unfinished(self) -> int:
        unfinished = self.slots.working - self.num_finished
        return unfinished if unfinished > 0 else 0

    def _free(self) -> int:
        """Return how many records may start now. One always may when nothing else is on its way, however large it is."""
        free = self.slots.free()
        if free <= 0 or self.limit_bytes is None:
            return free
        if not self._is_measured:
            return max(0, min(free, _UNMEASURED_RECORDS - self.slots.working))
        each = self._raw_bytes + self._made_bytes
        room = self.limit_bytes - self.headroom_bytes - self._held_bytes() - self._num_unfinished * each
        if free * each <= room:
            return free
        fitting = int(room // each) if room > 0 else 0
        return fitting or int(self.slots.is_idle)

    def _most(self) -> int:
        """Return how many records of the size last seen are within the bytes."""
        each = self._raw_bytes + self._made_bytes
        return self.slots.limit if self.limit_bytes is None or not each else int(min(self.slots.limit, self.limit_bytes / each))
