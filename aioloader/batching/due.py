"""Micro-batches that are settled and not handed out yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from aioloader.batching.restoring import find_item
from aioloader.protocols import Group, Item, Json, Ref

__all__ = ["DueGroups", "as_group", "as_refs"]


class DueGroups:
    """A queue of complete groups: what to form is decided at once, in `push`; handing out is lazy and can be interrupted."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: deque[Sequence[Item]] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, items: Sequence[Item]) -> None:
        """Settle a group of one or more items."""
        self._groups.append(items)

    def hand_out(self) -> Iterator[Group]:
        """Yield the groups in the order in which they were settled, each gone from the queue by then."""
        while self._groups:
            yield as_group(self._groups.popleft(), complete=True)

    def state(self) -> Json:
        """Return the groups as lists of (seq, sub)."""
        return [as_refs(items) for items in self._groups]

    def refs(self, state: Json) -> Iterable[Ref]:
        """Return the refs of all items of a state."""
        return [(seq, sub) for group in state for seq, sub in group]

    def restore(self, state: Json, items: Mapping[Ref, Item]) -> None:
        """Take over a state.

        Raises:
            ResumeError: An item was not made again.
        """
        self._groups = deque([[find_item(items, (seq, sub)) for seq, sub in group] for group in state])


def as_group(items: Sequence[Item], *, complete: bool) -> Group:
    """Return items as one group."""
    return Group([item.sample for item in items], items, complete)


def as_refs(items: Sequence[Item]) -> list[list[int]]:
    """Return items as JSON refers to them."""
    return [[item.seq, item.sub] for item in items]
