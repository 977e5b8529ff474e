"""The in-flight budget: how many records may be between the upstream and the trainer at once.

    acquire (producer)  ->  working  ->  open (in a micro-batch that is not complete)  ->  ready  ->  release (delivery)

A slot belongs to the work and comes back at delivery, not at completion: released at completion, one slow record would let
the ordered heap grow without bound.
"""

from __future__ import annotations

from aioloader.runtime.signal import Signal

__all__ = ["Budget", "Slots"]


class Slots:
    """The arithmetic of the budget, without waiting."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
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

        1. Within the limit: the rest of it.
        2. Above it only so far as a micro-batch needs more records than the limit to become complete: then nothing is ready,
           and either nothing is working or the open records alone exceed the limit.
        """
        if self.in_flight < self.limit:
            return self.limit - self.in_flight
        starving = self.ready == 0 and (self.working == 0 or self.open >= self.limit)
        return max(0, self.limit - self.working) if starving else 0

    def start(self, num_records: int) -> None:
        """Count records that the producer takes."""
        self.working += num_records
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

    def deliver(self, num_records: int) -> None:
        """Uncount records of a delivered micro-batch."""
        self.ready -= num_records


class Budget:
    """`Slots` that the producer can wait on."""

    def __init__(self, limit: int) -> None:
        self.slots = Slots(limit)
        self._changed = Signal()

    async def acquire(self, max_records: int) -> int:
        """Wait for free slots and take up to `max_records`; return how many.

        Slots that come back one by one are gathered until they are worth a read, as long as others have work.
        """
        while True:
            free = self.slots.free()
            enough = min(max_records, max(1, self.slots.limit // 8))  # the limit may change meanwhile
            if free >= enough or (free and self.slots.is_idle):
                break
            await self._changed.wait()
        taken = min(free, max_records)
        self.slots.start(taken)
        return taken

    def changed(self) -> None:
        """Wake the producer after slots were moved or given back."""
        self._changed.notify()
