"""One synchronizer for each model, and what it gives back: its hooks and its process group."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from aioloader.training.gradients.overlap import Outbox

__all__ = ["Owner", "release", "take_over"]


class Owner(Protocol):
    """What is attached to a model."""

    def close(self) -> None:
        """Detach."""


_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Owner]] = weakref.WeakKeyDictionary()
"""Who is attached to a model: two would take each other's gradients."""


def take_over(model: nn.Module, owner: Owner) -> None:
    """Close what was attached to `model` before."""
    former = _owners.get(model)
    earlier = former() if former is not None else None
    if earlier is not None:
        earlier.close()
    _owners[model] = weakref.ref(owner)


def release(handles: Sequence[RemovableHandle], outbox: Outbox) -> None:
    """Remove the hooks and give the group back, unless something still waits for a rank in it: then it ends with the process group."""
    for handle in handles:
        handle.remove()
    group = None if outbox.group is None else outbox.group.group
    if group is not None and dist.is_initialized() and outbox.is_idle and "nccl" not in dist.get_backend_config(group):
        with suppress(RuntimeError, ValueError, AssertionError):  # whoever destroys the default group destroys this too
            dist.destroy_process_group(group)
