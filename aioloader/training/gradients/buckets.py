"""Flat buckets: many gradients travel as one tensor, so that a step needs few collectives.

parameters   0.weight  0.bias  2.weight  2.bias       backward ends with the first ones
buckets      [2.bias 2.weight] [0.bias 0.weight]      so the last ones are sent first
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["Bucket", "FlatGradients", "make_buckets", "plan_buckets"]


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
    """Some parameters of one dtype and device, whose gradients travel together, and the dtypes in which they do.

    Args:
        indexes: The parameters' places in the model, in the order of the bucket.
        named: All parameters of the model with their names.
        accumulate_dtype: Dtype of the averages, and of sums over micro-batches; default: the parameters' own.
        comm_dtype: Dtype on the wire; default: that of the averages.

    Attributes:
        widens: Whether gradients are summed in another dtype than the one that backward makes.
    """

    def __init__(
        self,
        indexes: Sequence[int],
        named: Sequence[tuple[str, Parameter]],
        *,
        accumulate_dtype: torch.dtype | None = None,
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        self.indexes = list(indexes)
        self.parameters = [named[index][1] for index in indexes]
        self.dtype = accumulate_dtype or self.parameters[0].dtype
        self.wire_dtype = comm_dtype or self.dtype
        self.widens = self.dtype != self.parameters[0].dtype
        self.device = self.parameters[0].device
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        self._ends = named[indexes[0]][0], named[indexes[-1]][0]

    @property
    def num_bytes(self) -> int:
        """Return the size on the wire."""
        return self.numel * self.wire_dtype.itemsize

    def describe(self) -> str:
        """Return the shape and dtype on the wire and the first and last parameter, for messages."""
        first, last = self._ends
        names = first if len(self.parameters) == 1 else f"{first} to {last}"
        return f"{str(self.wire_dtype).removeprefix('torch.')}[{self.numel}], {names}"

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of `flat`, each with the shape of its parameter, and with its strides where those are dense."""
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self.parameters]
        return [part.as_strided(parameter.shape, stride) for part, parameter, stride in zip(parts, self.parameters, strides, strict=True)]


def make_buckets(
    named: Sequence[tuple[str, Parameter]], max_bytes: int, *, accumulate_dtype: torch.dtype | None, comm_dtype: torch.dtype | None
) -> list[Bucket]:
    """Return the buckets of a model, in the order in which they are sent; see `plan_buckets` and `Bucket`."""
    wires = [comm_dtype or accumulate_dtype or parameter.dtype for _, parameter in named]
    kinds = [(parameter.dtype, parameter.device) for _, parameter in named]
    sizes = [(kind, p.numel() * wire.itemsize) for kind, wire, (_, p) in zip(kinds, wires, named, strict=True)]
    return [Bucket(indexes, named, accumulate_dtype=accumulate_dtype, comm_dtype=comm_dtype) for indexes in plan_buckets(sizes, max_bytes)]


class FlatGradients:
    """The gradients of a bucket: this rank's shares of the average while they come in, the averages after the all-reduce.

    A gradient is multiplied with `scale` as it comes in, in the pass that copies it: with float16 on the wire a sum over the ranks
    may overflow where the average does not (30,000 on each of 4 ranks). Holds as much memory as the gradients, from the first one on
    for good.

    Args:
        bucket: What it holds.
        scale: 1 / number of ranks; 1 where the backend divides by itself, as NCCL does, also before it adds.
    """

    def __init__(self, bucket: Bucket, scale: float) -> None:
        self._bucket = bucket
        self._scale = scale
        self.values = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        self.views = bucket.views(self.values)
        self.is_filled = [False] * len(self.views)
        self._wire = self.values if bucket.wire_dtype == bucket.dtype else torch.empty_like(self.values, dtype=bucket.wire_dtype)

    @torch.no_grad()
    def take(self, place: int) -> None:
        """Move the `.grad` of a parameter in here, adding it to what has come before; the parameter is left without."""
        parameter, view = self._bucket.parameters[place], self.views[place]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "only a gradient that is there can be taken"
        if self.is_filled[place]:
            view.add_(gradient, alpha=self._scale)
        elif gradient.dtype == view.dtype and gradient is not view:
            torch.mul(gradient, self._scale, out=view)
        else:  # wider here, or it was zeroed in place after the step before and backward added to it here
            view.copy_(gradient).mul_(self._scale)
        self.is_filled[place] = True

    @torch.no_grad()
    def seal(self) -> Tensor:
        """Return the tensor to be summed over the ranks; what has not come counts as zero."""
        for view, is_filled in zip(self.views, self.is_filled, strict=True):
            if not is_filled:
                view.zero_()
        if self._wire is not self.values:
            self._wire.copy_(self.values)
        return self._wire

    @torch.no_grad()
    def open(self) -> None:
        """Take over the averages from the tensor that `seal` returned."""
        if self._wire is not self.values:
            self.values.copy_(self._wire)

    @torch.no_grad()
    def hand_out(self, used: list[bool]) -> None:
        """Leave in each `.grad` its average, cast to the parameter's dtype where that is another; without one if it is not `used`."""
        for parameter, view, is_used in zip(self._bucket.parameters, self.views, used, strict=True):
            parameter.grad = view.to(parameter.dtype) if is_used else None

    def clear(self) -> None:
        """Forget what has come: the next gradients begin new sums."""
        self.is_filled = [False] * len(self.views)
