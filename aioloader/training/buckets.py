"""Flat buckets: many gradients travel as one tensor, so that a step needs few collectives."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["Bucket", "plan_buckets"]


def plan_buckets(sizes: Sequence[tuple[Hashable, int]], max_bytes: int) -> list[list[int]]:
    """Return the indexes of `sizes`, cut into buckets.

    Each bucket holds one kind only and at most `max_bytes`, but for an element that is larger by itself. Elements go from the
    last to the first, the order in which a backward pass tends to finish gradients. The same input gives the same buckets.

    Args:
        sizes: (kind, bytes) of each element.
        max_bytes: Room in a bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[int, int]] = {}
    for index in reversed(range(len(sizes))):
        kind, num_bytes = sizes[index]
        place, filled = open_buckets.get(kind, (-1, 0))
        if place < 0 or filled + num_bytes > max_bytes:
            place, filled = len(buckets), 0
            buckets.append([])
        buckets[place].append(index)
        open_buckets[kind] = (place, filled + num_bytes)
    return buckets


class Bucket:
    """The gradients of some parameters of one dtype and device, as one flat tensor on the wire.

    With float16 on the wire, gradients are divided before the sum, which may overflow otherwise (the sum over 4 ranks of 30,000
    does not fit, their average does); other dtypes are divided after it, which loses nothing.
    """

    def __init__(self, indexes: Sequence[int], parameters: Sequence[Parameter], wire_dtype: torch.dtype | None, num_ranks: int) -> None:
        self.indexes = list(indexes)
        self._parameters = [parameters[index] for index in indexes]
        self._dtype = wire_dtype or self._parameters[0].dtype
        self._num_ranks = num_ranks
        self._divide_first = self._dtype == torch.float16
        self.numel = sum(parameter.numel() for parameter in self._parameters)

    @property
    def num_bytes(self) -> int:
        """Return the size on the wire."""
        return self.numel * self._dtype.itemsize

    def describe(self) -> str:
        """Return the shape and dtype on the wire, for messages."""
        return f"{str(self._dtype).removeprefix('torch.')}[{self.numel}]"

    def pack(self) -> Tensor:
        """Return this rank's share of the sum; a parameter without a gradient counts as zero."""
        flat = torch.empty(self.numel, dtype=self._dtype, device=self._parameters[0].device)
        for parameter, part in zip(self._parameters, self._parts(flat), strict=True):
            if parameter.grad is None:
                part.zero_()
            elif self._divide_first:
                part.copy_(parameter.grad / self._num_ranks)
            else:
                part.copy_(parameter.grad)
        return flat

    def unpack(self, flat: Tensor, used: Sequence[bool]) -> None:
        """Leave the average in each `.grad`; a parameter that is not `used` on any rank is left without a gradient."""
        for parameter, part, is_used in zip(self._parameters, self._parts(flat), used, strict=True):
            if not is_used:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part)
            if not self._divide_first:
                parameter.grad.div_(self._num_ranks)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]
