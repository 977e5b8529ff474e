"""Gives all ranks of a group the tensors of its first rank, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aioloader.errors import SynchronizationError
from aioloader.training.groups.dp_group import DataParallelGroup

__all__ = ["broadcast_tensors"]


@torch.no_grad()
def broadcast_tensors(dp: DataParallelGroup, named: Sequence[tuple[str, Tensor]], operation: str) -> None:
    """Overwrite `named` with those of rank 0 of the group; alone, do nothing.

    They travel as bytes in the order of their elements: gloo knows few dtypes, and of a tensor with gaps in its memory it writes to the
    gaps and beyond.

    Args:
        dp: The ranks, each of which calls this.
        named: Tensors with their names, the same on every rank, of any dtypes and strides.
        operation: Named in errors.

    Raises:
        SynchronizationError: A rank is missing or has other names, dtypes or shapes; nothing was changed then.
    """
    if dp.size == 1:
        return
    layout = repr([(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in named])
    if not dp.agrees(layout, f"{operation}, comparison of tensors"):
        message = (
            f"on dp_rank {dp.rank}: expected parameters and buffers of the same names, dtypes and shapes on all {dp.size} ranks, got "
            f"{len(named)} here and others elsewhere; build the same model on every rank"
        )
        raise SynchronizationError(operation, message)
    for name, tensor in named:
        if not tensor.numel():
            continue
        values = _without_repeats(tensor.detach())
        sent = values.contiguous()
        dp.start_broadcast(sent.view(-1).view(torch.uint8), f"{operation}, {name}").wait(dp.timeout_s)
        if sent.data_ptr() != values.data_ptr():
            values.copy_(sent)


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return the part of an expanded tensor in which each element of its memory occurs once."""
    return tensor[tuple(0 if stride == 0 else slice(None) for stride in tensor.stride())]
