"""The in-flight budget: how many records, and how many bytes, may be between the upstream and the trainer at once.

    acquire (producer)  ->  working  ->  open (in a micro-batch that is not complete)  ->  ready  ->  release (delivery)

A slot belongs to the work and comes back at delivery, not at completion: released at completion, one slow record would let
the ordered heap grow without bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aioloader.runtime.signal import Signal

__all__ = ["Budget", "Slots"]

_FORGETTING = 0.95
"""Per chunk, or read: how fast a large record is forgotten."""
_OVERHEAD_BYTES = 1024
"""Per record: so much more on its way says nothing of what it holds."""


class Slots:
    """The arithmetic of the budget, without waiting."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reserved = 0
        """Kept free for one micro-batch that is not in memory and comes back."""
        self.working = 0
        self.open = 0
        self.open_bytes = 0.0
        """What open records take that nobody else counts; which of them are large is not known."""
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

    def hold(self, num_records: int = 1, each_bytes: float = 0.0) -> None:
        """Move records from working to open, or back where negative."""
        self.working -= num_records
        if num_records < 0:
            self.discard(-num_records)
        else:
            self.open += num_records
            self.open_bytes += num_records * each_bytes

    def complete(self, num_records: int) -> None:
        """Move records from open to ready: their micro-batch can be delivered."""
        self.discard(num_records)
        self.ready += num_records

    def discard(self, num_records: int) -> None:
        """Uncount open records whose incomplete micro-batch is dropped."""
        if self.open_bytes:
            self.open_bytes = self.open_bytes / self.open * (self.open - num_records) if self.open > num_records else 0.0
        self.open -= num_records

    def put_aside(self, num_records: int) -> None:
        """Uncount open records that leave memory for a while."""
        self.discard(num_records)
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

    Bytes are counted where they lie (`held_bytes`: results in shared memory and batches that wait for the trainer) and, of raw
    records, as they were measured when they were read. What results will take is foretold by the last ones, twice:

    1. Records are read only while all in flight, with what they will become, are within the limit.
    2. They are given to workers only while that is still so by what is known then; the one whose turn it is always may be.

    So a result above what was foretold is one of those that were being made when it came as a surprise.

    Args:
        num_unmeasured: Records that may start before the first result shows how large they are.

    Attributes:
        limit_bytes: None: however large records are.
        headroom_bytes: Kept free for what is copied before the original is let go: a micro-batch.
        num_finished: Of the records that count as working, those whose results `held_bytes` counts already.
    """

    def __init__(
        self, limit: int, limit_bytes: int | None = None, held_bytes: Callable[[], int] = lambda: 0, *, num_unmeasured: int = 1
    ) -> None:
        self.slots = Slots(limit)
        self.limit_bytes = limit_bytes
        self.headroom_bytes = 0
        self.num_finished = 0
        self.peak_bytes = 0
        self._held_bytes = held_bytes
        self._num_unmeasured = num_unmeasured
        self._raw_bytes = 0
        """Of what was read and is not finished."""
        self._coming_bytes = 0
        """Of results that are being made, by what was foretold."""
        self._each_raw_bytes = 0.0
        self._each_made_bytes = 0.0
        self._hidden_bytes = 0.0
        """What a record takes on its way to a worker, beyond what it seems to take where it was read."""
        self._is_measured = False
        self._wanted = 1
        self._changed = Signal()
        self._is_short = False
        self.on_room: Callable[[], None] = _ignore
        """Called when there may be room for records that were not admitted."""

    @property
    def in_flight_bytes(self) -> int:
        """Return the bytes of raw records, finished results and waiting batches."""
        return self._held_bytes() + self._raw_bytes

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of finished results and waiting batches."""
        return self._held_bytes()

    def note_read(self, sizes: Sequence[int]) -> Sequence[int]:
        """Learn what records seem to take that were just read; return what they count for as long as they wait or are run."""
        if hidden_bytes := int(self._hidden_bytes):
            sizes = [size + hidden_bytes for size in sizes]
        self._each_raw_bytes = max(sum(sizes) / max(1, len(sizes)), self._each_raw_bytes * _FORGETTING)
        return sizes

    def hold_raw(self, nbytes: int) -> None:
        """Count raw records that were read; uncount, where negative, those whose results are there."""
        self._raw_bytes += nbytes

    def begin(self, nbytes: int) -> None:
        """Count what results that are made now are expected to take."""
        self._coming_bytes += nbytes

    def finish(self, nbytes: int) -> None:
        """Uncount it: they are there, or will not be."""
        self._coming_bytes -= nbytes

    def observe(self, num_records: int, raw_bytes: int, made_bytes: int) -> None:
        """Learn what records took, on their way to a worker and as results."""
        if num_records:
            self._each_raw_bytes = max(raw_bytes / num_records, self._each_raw_bytes * _FORGETTING)
            self._each_made_bytes = max(made_bytes / num_records, self._each_made_bytes * _FORGETTING)
            if not self._is_measured:
                self._is_measured = True
                self._changed.notify()
        self.note_peaks()

    def observe_raw(self, num_records: int, raw_bytes: int, seeming_bytes: int) -> None:
        """Learn by how much records take more than they seem to, such as objects of classes that nothing is known of."""
        hidden_bytes = (raw_bytes - seeming_bytes) / max(1, num_records)
        self._hidden_bytes = max(self._hidden_bytes * _FORGETTING, hidden_bytes if hidden_bytes > _OVERHEAD_BYTES else 0.0)

    def num_admitted(self, num_wanted: int, *, is_next: bool, is_placed: bool = False) -> int:
        """Return how many records that were read may be given to a worker now: those wanted, or none; `on_room` tells when to ask again.

        Args:
            num_wanted: At least 1.
            is_next: Whether nothing comes before them that is not done. If nothing waits for the trainer either, nothing makes room for
                them, and some are admitted in any case.
            is_placed: Whether the memory for their results is counted already.
        """
        number = num_wanted
        if self.limit_bytes is not None:
            each = 0.0 if is_placed else self._each_made_bytes
            room = self.limit_bytes - self.in_flight_bytes - self._coming_bytes
            if num_wanted * each > room:
                number = max(1, min(num_wanted, int(room / each))) if each else 1
                number *= is_next and not self.slots.ready
        self._is_short = not number
        return number

    def note_peaks(self) -> None:
        """Note how much is in flight if it is more than ever."""
        self.slots.note_peak()
        in_flight = self.in_flight_bytes
        if in_flight > self.peak_bytes:
            self.peak_bytes = in_flight

    def estimated_bytes(self, num_records: int) -> int:
        """Return what the results of so many records take, by the size of the last ones."""
        return int(num_records * self._each_made_bytes)

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
        """Wake whoever waits after slots or bytes were moved or given back, the producer only if what it waits for is there."""
        if self._is_short:
            self.on_room()
        if self._changed.has_waiters and self._has_enough():
            self._changed.notify()

    def _has_enough(self) -> bool:
        """Return whether the records that may start are worth a read, or are all that there will be."""
        free = self._free()
        if self._is_unmeasured:
            return free > 0
        enough = min(self._wanted, max(1, min(self.slots.limit, self._most()) // 4))  # both may change meanwhile
        return free >= enough or (free > 0 and self.slots.is_idle)

    @property
    def _is_unmeasured(self) -> bool:
        """Return whether it matters how large results are, and none has shown it."""
        return self.limit_bytes is not None and not self._is_measured

    @property
    def _num_unfinished(self) -> int:
        unfinished = self.slots.working - self.num_finished
        return unfinished if unfinished > 0 else 0

    def _free(self) -> int:
        """Return how many records may start now. One always may when nothing else is on its way, however large it is."""
        free = self.slots.free()
        if free <= 0 or self.limit_bytes is None:
            return free
        if self._is_unmeasured:
            return max(0, min(free, self._num_unmeasured - self.slots.working))
        each = self._each_raw_bytes + self._each_made_bytes
        room = self.limit_bytes - self.headroom_bytes - self.in_flight_bytes - self._num_unfinished * self._each_made_bytes
        if free * each <= room:
            return free
        fitting = int(room // each) if room > 0 else 0
        return fitting or int(self.slots.is_idle)

    def _most(self) -> int:
        """Return how many records of the size last seen are within the bytes."""
        each = self._each_raw_bytes + self._each_made_bytes
        return self.slots.limit if self.limit_bytes is None or not each else int(min(self.slots.limit, self.limit_bytes / each))


def _ignore() -> None:
    """Tell nobody."""
