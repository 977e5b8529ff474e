"""A lane's micro-batches that wait for their turn: the oldest in memory, later ones maybe stored elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from aioloader.engine.lane import LaneBatch
from aioloader.engine.overflow import Stored
from aioloader.protocols import Group

__all__ = ["WaitingBatches"]

_NOTHING = Group((), ())


class WaitingBatches:
    """A queue: first those that stay in memory, then those that are stored, then new ones.

    Attributes:
        num_records: The in-flight slots of those in memory.
    """

    __slots__ = ("_batches", "_num_new", "_num_stored", "num_records")

    def __init__(self) -> None:
        self._batches: deque[LaneBatch] = deque()
        self._num_stored = self._num_new = self.num_records = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[LaneBatch]:
        return iter(self._batches)

    def append(self, batch: LaneBatch) -> None:
        """Let one more wait."""
        self._batches.append(batch)
        self._num_new += 1
        self.num_records += batch.num_records

    def popleft(self) -> LaneBatch:
        """Take the oldest."""
        batch = self._batches.popleft()
        self._num_new = min(self._num_new, len(self._batches))
        if batch.stored is None:
            self.num_records -= batch.num_records
        else:
            self._num_stored -= 1
        return batch

    def clear(self) -> None:
        """Forget all."""
        self._batches.clear()
        self._num_stored = self._num_new = self.num_records = 0

    def keep(self) -> None:
        """Let those in memory stay there, as far as nothing is stored before them."""
        if not self._num_stored:
            self._num_new = 0

    @property
    def num_records_ahead(self) -> int:
        """Return the in-flight slots of those in memory that are not of the step that is formed now."""
        if len(self._batches) < 2:
            return 0
        oldest = self._batches[0]
        return self.num_records - (oldest.num_records if oldest.stored is None else 0)

    def storable(self) -> LaneBatch | None:
        """Return the first of the new ones, if it is not the very next. It stays the first until `replace`, or until others are taken."""
        if self._num_new == len(self._batches):
            self._num_new = max(0, self._num_new - 1)
        return self._batches[-self._num_new] if self._num_new else None

    def replace(self, stored: Stored) -> None:
        """Note where the first of the new ones was stored."""
        batch = self._batches[-self._num_new]
        self._batches[-self._num_new] = batch._replace(group=_NOTHING, stored=stored)
        self.num_records -= batch.num_records
        self._num_stored += 1
        self._num_new -= 1
