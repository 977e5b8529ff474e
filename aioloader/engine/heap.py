"""The ordered heap: takes results in any order, gives them back in the order of their index."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

__all__ = ["OrderedHeap"]

T = TypeVar("T")


class OrderedHeap(Generic[T]):
    """A priority queue over dense indices 0, 1, 2, ...; each entry covers `width` consecutive ones."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, T]] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_next(self) -> bool:
        """Return whether the entry whose turn it is is there."""
        return bool(self._entries) and self._entries[0][0] == self._next

    def is_next(self, index: int) -> bool:
        """Return whether everything before `index` was given back."""
        return index == self._next

    def push(self, index: int, width: int, entry: T) -> None:
        """Add the entry for indices `index` to `index + width - 1`; `width` is at least 1."""
        if index < self._next:
            raise ValueError(f"OrderedHeap.push: expected an index of at least {self._next}, got {index}; it was released already.")
        heapq.heappush(self._entries, (index, width, entry))

    def pop(self) -> T | None:
        """Return the entry whose turn it is, or None while it is missing."""
        if not self.has_next:
            return None
        _, width, entry = heapq.heappop(self._entries)
        self._next += width
        return entry
