"""Takes the groups that a loader delivers apart into samples, and knows the state as of each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aioloader.dropin.handover import take_over
from aioloader.protocols import Json

if TYPE_CHECKING:
    from aioloader.bridge.batch import Batch
    from aioloader.bridge.iterator import BatchIterator

__all__ = ["OrderWatch", "Place", "SampleIterator"]


class Place:
    """Where a pass stands: `num_samples` after the state that `before` returns. It outlives the iterator, and keeps no sample alive."""

    __slots__ = ("before", "ended", "epoch", "num_samples")

    def __init__(self, epoch: int, before: Callable[[], Json], *, ended: bool = False) -> None:
        self.epoch = epoch
        self.before = before
        self.num_samples = 0
        self.ended = ended


class OrderWatch:
    """Says, once, that records do not give one sample each, so that the workers of a DataLoader cannot keep their order."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._seq: int | None = None
        self._is_over = num_workers == 1

    def look(self, batch: Batch) -> None:
        """Look at the records of the next samples."""
        if self._is_over:
            return
        for info in batch.samples:
            if info.sub or (self._seq is not None and info.seq != self._seq):
                self._is_over = True
                warnings.warn(
                    f"AsyncPreprocessIterableDataset: expected one sample from each record in a DataLoader with {self._num_workers} "
                    "workers, got none or several from some: nothing is lost or repeated, but the samples of "
                    "different workers no longer alternate in the order of the records. Use DataLoader(num_workers=0): the "
                    "dataset has workers of its own.",
                    UserWarning,
                    stacklevel=4,
                )
                return
            self._seq = info.seq + 1


class SampleIterator:
    """The samples of one pass. Ends with the pass, when a newer one starts, with `close`, or when it is no longer referenced."""

    def __init__(self, batches: BatchIterator | None, place: Place, num_to_skip: int, watch: OrderWatch) -> None:
        self._batches = batches
        self._place = place
        self._to_skip = num_to_skip
        self._watch = watch
        self._state_after: Callable[[], Json] = place.before
        self._samples: list[Any] = []
        self._next = 0

    def __iter__(self) -> SampleIterator:
        """Return the iterator itself."""
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next sample, waiting for it.

        Raises:
            AioLoaderError: A stage failed; everything before the failing record was given. Raised again by every later call.
        """
        while self._next == len(self._samples):
            self._fetch()
        sample: dict[str, Any] = self._samples[self._next]
        self._samples[self._next] = None
        self._next += 1
        self._place.num_samples += 1
        return sample

    def close(self) -> None:
        """Leave the pass and end what it started; safe to call twice."""
        self._samples, self._next = [], 0
        if self._batches is not None:
            self._batches.close()

    def _fetch(self) -> None:
        if self._batches is None or self._place.ended:
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            self._place.ended = True
            raise
        self._watch.look(batch)
        self._place.before, self._state_after = self._state_after, batch.state
        self._samples = take_over(batch)
        batch.clear()  # it stays, for its state
        self._next = self._place.num_samples = min(self._to_skip, len(self._samples))
        self._to_skip -= self._next
