"""A fixed number of samples per micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aioloader.batching.counters import zero_counters
from aioloader.batching.options import require_positive
from aioloader.batching.restoring import find_item
from aioloader.protocols import Group, Item, Json, Ref
from aioloader.sequences import Chain, samples_of

__all__ = ["FixedBatch"]


@dataclass(frozen=True, slots=True)
class FixedBatch:
    """Groups `batch_size` samples in the order in which they come; the last group of an epoch may hold fewer.

    Attributes:
        batch_size: Samples per micro-batch, at least 1.

    Raises:
        ConfigError: `batch_size` is not a positive int.
    """

    batch_size: int

    def __post_init__(self) -> None:
        """Check the option."""
        require_positive("FixedBatch(batch_size=...)", self.batch_size)

    def start(self) -> _FixedBatcher:
        """Return a fresh batcher for one lane."""
        return _FixedBatcher(self.batch_size)

    def fingerprint(self) -> dict[str, Json]:
        """Return the options that decide the groups."""
        return {"kind": "FixedBatch", "batch_size": self.batch_size}


class _FixedBatcher:
    """Holds the items that have not been yielded yet, fewer than `batch_size` once `ready` is used up."""

    __slots__ = ("_batch_size", "_num_items", "_parts")

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._parts: list[Sequence[Item]] = []
        self._num_items = 0

    def __repr__(self) -> str:
        return f"<FixedBatch {self._num_items}/{self._batch_size} samples>"

    def push(self, item: Item) -> Iterator[Group]:
        self._hold([item])
        return self.ready() if self._num_items >= self._batch_size else iter(())

    def push_run(self, items: Sequence[Item]) -> Iterator[tuple[Group, int]]:
        at, num_items, size = 0, len(items), self._batch_size
        while (end := at + size - self._num_items) <= num_items:
            part, at = items[at:end], end
            if self._num_items:
                self._hold(part)
                yield self._take(complete=True), at
            else:
                yield Group(samples_of(part), part), at
        self._hold(items[at:])

    def ready(self) -> Iterator[Group]:
        while self._num_items >= self._batch_size:
            yield self._take(complete=True)

    def finish(self) -> Iterator[Group]:
        yield from self.ready()
        if self._num_items:
            yield self._take(complete=False)

    def counters(self) -> dict[str, int]:
        return zero_counters()

    def state(self) -> Json:
        return {"refs": [[item.seq, item.sub] for part in self._parts for item in part]}

    def refs(self, state: Json) -> Iterable[Ref]:
        return [(seq, sub) for seq, sub in state["refs"]]

    def restore(self, state: Json, items: Mapping[Ref, Item]) -> None:
        self._parts, self._num_items = [], 0
        self._hold([find_item(items, ref) for ref in self.refs(state)])

    def _hold(self, items: Sequence[Item]) -> None:
        if len(items):
            self._parts.append(items)
            self._num_items += len(items)

    def _take(self, *, complete: bool) -> Group:
        items = Chain.of(self._parts)
        self._parts, self._num_items = [], 0
        if len(items) > self._batch_size:
            items, rest = items[: self._batch_size], items[self._batch_size :]
            self._hold(rest)
        return Group(samples_of(items), items, complete)
