"""Process groups of some ranks, used again and again.

Torch names a group that only its members make after its ranks. One that is made anew after the same ranks have destroyed theirs finds
the old addresses in the store and cannot connect, so groups go back to a shelf instead.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

__all__ = ["NEVER", "SharedGroup"]

NEVER = datetime.timedelta(days=365)
"""The deadline of the group itself: whoever waits in it keeps deadlines of its own."""


@dataclass(eq=False, slots=True)
class SharedGroup:
    """A group of some ranks.

    Attributes:
        group: Torch's.
        num_passes: Passes that it was used for: numbers that all its ranks come to alike.
        sent: Collectives under way, with the tensors that they read.
        awaited: A collective that was begun and not waited for, with the tensor that it writes; whoever uses the group next takes it over.
    """

    group: Any
    ranks: tuple[int, ...]
    backend: str
    world: Any
    num_passes: int = 0
    sent: deque[tuple[list[Any], list[Any]]] = field(default_factory=deque)
    awaited: tuple[Any, Any] | None = None

    @classmethod
    def take(cls, ranks: Sequence[int], backend: str) -> SharedGroup:
        """Return a group of these ranks, this one among them, that nobody uses; collective over them."""
        world = dist.group.WORLD
        _shelf[:] = [one for one in _shelf if one.world is world]
        for one in _shelf:
            if one.ranks == tuple(ranks) and one.backend == backend:
                _shelf.remove(one)
                return one
        group = dist.new_group(list(ranks), backend=backend, timeout=NEVER, use_local_synchronization=True)
        return cls(group, tuple(ranks), backend, world)

    @property
    def is_current(self) -> bool:
        """Return whether the default process group is still the one that this was made in."""
        return dist.is_initialized() and dist.group.WORLD is self.world

    def give_back(self) -> None:
        """Let the next one take it; all its ranks do so."""
        if self.is_current:
            _shelf.append(self)


_shelf: list[SharedGroup] = []
