"""Process groups of a loader's own: made by all ranks of the job alike, and given back where nothing is under way in them any more.

Torch numbers groups on all ranks, also those that are no members. It can name one that only its members make, but by how many groups a
rank has, and ranks that do not have equally many wait for each other without end.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from aioloader.errors import SynchronizationError

__all__ = ["Group"]

_NEVER = datetime.timedelta(days=365)
"""The deadline of a collective: whoever waits for one keeps deadlines of its own. One may be begun long before anybody waits for it."""

_given_back: list[tuple[Any, Any, list[tuple[Any, Any]]]] = []
"""Groups with something under way, their worlds, and what that is."""


class Group:
    """A process group of some ranks. Making one is collective over the job: ranks that are no members make theirs too, to no use.

    Args:
        ranks: Of the group, rising; None: all.
        backend: For `torch.distributed.new_group`.
        timeout_s: How long to wait for the members to connect. NCCL, which connects later and takes this for collectives too, has no limit.
        operation: Named in errors.

    Raises:
        SynchronizationError: A member did not connect.
    """

    def __init__(self, ranks: Sequence[int] | None, *, backend: str = "gloo", timeout_s: float, operation: str) -> None:
        _destroy_idle()
        self._world = _world()
        timeout = _NEVER if "nccl" in backend else datetime.timedelta(seconds=timeout_s)
        try:
            self._handle: Any = dist.new_group(None if ranks is None else list(ranks), backend=backend, timeout=timeout)
        except RuntimeError as error:
            members = "all ranks" if ranks is None else f"ranks {list(ranks)}"
            message = f"on rank {dist.get_rank()}: expected {members} to connect within {timeout_s:g} s, got: {error}; look in their logs"
            raise SynchronizationError(operation, message) from error

    @property
    def is_current(self) -> bool:
        """Return whether the default process group is still the one that this was made in."""
        return self._world is _world()

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to send the tensor of the first member to the others, into theirs; raise RuntimeError if a connection is gone."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp, options.timeout = 0, 0, True, _NEVER
        return self._handle.broadcast([tensor], options)

    def minimum(self, tensor: torch.Tensor) -> Any:
        """Begin to replace the tensor by the element-wise minimum over all members; raise RuntimeError if a connection is gone."""
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.MIN), _NEVER
        return self._handle.allreduce([tensor], options)

    def give_back(self, under_way: Iterable[tuple[Any, Any]] = ()) -> None:
        """Destroy the group once these collectives (with their memory) are over, at the latest with the process group."""
        handle, self._handle = self._handle, None
        if handle is not None and handle is not dist.GroupMember.NON_GROUP_MEMBER:
            _given_back.append((handle, self._world, list(under_way)))
        _destroy_idle()


def _destroy_idle() -> None:
    """Destroy the groups that were given back and have nothing under way by now."""
    world = _world()
    busy = [one for one in _given_back if one[1] is world and not all(work.is_completed() for work, _ in one[2])]
    idle = [one for one in _given_back if one not in busy]
    _given_back[:] = busy
    for handle, its_world, _ in idle:
        if its_world is world:  # whoever destroyed that one has destroyed its groups too
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(handle)


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None
