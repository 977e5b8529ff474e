"""`Batch`: a dict of tensors that knows where its samples came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from aioloader.bridge.filler import filler_fields
from aioloader.engine.channel import Delivered
from aioloader.engine.layout import Field
from aioloader.engine.output import Ready, TensorArray
from aioloader.protocols import Json, RecordId
from aioloader.sequences import as_tensor

__all__ = ["Batch", "SampleInfo", "to_batch"]


class SampleInfo(NamedTuple):
    """The provenance of one sample: `row` of `shard`, the `sub`-th sample made of record `seq` of a lane, in `epoch`."""

    shard: str
    row: int
    seq: int
    sub: int
    epoch: int

    @property
    def record(self) -> RecordId:
        """Return (shard, row): the id of the record that the sample was made of."""
        return (self.shard, self.row)


class Batch(dict[str, Any]):
    """One micro-batch.

    A dict from field name to tensor, on the CPU until `to`. The tensors may view shared memory that the loader reuses once
    they and all their views are gone; keeping them is safe.

    Attributes:
        step: The optimizer step it belongs to, counted over the whole run from 0.
        lane: The logical data-parallel stream it comes from.
        epoch: The epoch of its last sample.
        num_samples: Samples in it; 0 for a filler.
        num_tokens: Real tokens.
        num_padding: Padding tokens.
        num_targets: Tokens that the loss counts.
        wait_s: Seconds that the trainer waited for it.
        wait_cause: What it waited for: "source", "cpu" (the workers), "order" (a slow record before others), "ranks" (others had not
            said yet whether they have it too), or "consumer": it did not wait, the batch was there.
        is_filler: True for micro-batches that only keep ranks in step (`end="pad"`): fields like those of the last micro-batch of the lane,
            with all labels ignored and everything else zero (masks one), no samples, all counts 0.
    """

    __slots__ = (
        "_base",
        "_facts",
        "_samples",
        "epoch",
        "is_filler",
        "lane",
        "num_padding",
        "num_samples",
        "num_targets",
        "num_tokens",
        "step",
        "wait_cause",
        "wait_s",
    )

    def __init__(self, fields: dict[str, Any], facts: Ready | Delivered, base: dict[str, Json]) -> None:
        super().__init__(fields)
        self.step = facts.step
        self.lane = facts.lane
        self.epoch = facts.epoch
        self.num_samples = facts.num_samples
        self.num_tokens = facts.num_tokens
        self.num_padding = facts.num_padding
        self.num_targets = facts.num_targets
        self.is_filler = facts.is_filler
        self.wait_s = 0.0
        self.wait_cause = "consumer"
        self._facts = facts
        self._base = base
        self._samples: list[SampleInfo] | None = None

    @property
    def samples(self) -> list[SampleInfo]:
        """Return the provenance of each sample, in the order of the batch."""
        if self._samples is None:
            rows = self._facts.load_records()
            self._samples = [SampleInfo(shard, row, seq, sub, self.epoch) for (shard, row), seq, sub in rows]
        return self._samples

    def state(self) -> Json:
        """Return the loader's state as of this batch."""
        return {**self._base, **self._facts.state_loader()()}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return a copy of the batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return a copy of the batch in page-locked host memory, from which copies to a GPU can overlap with work."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        fields = {name: function(value) if isinstance(value, torch.Tensor) else value for name, value in self.items()}
        return Batch(fields, self._facts, self._base)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {_shape(value)}" for name, value in self.items())
        return f"<Batch step {self.step} lane {self.lane}, {self.num_tokens} tokens; {shapes}>"


def to_batch(facts: Ready | Delivered, base: dict[str, Json]) -> Batch:
    """Return the batch with its arrays as tensors, over the same memory where that is the batch's own.

    `base` is the state that the pass began with; the facts hold what of it is new.
    """
    if facts.is_filler:
        return Batch(filler_fields(facts.state_loader()()["lanes"], facts.lane), facts, base)
    if isinstance(facts, Delivered):
        fields = _shared_tensors(facts)
        facts.memory, facts.others = None, {}  # a copy of the batch on another device must not keep them alive
        return Batch(fields, facts, base)
    # Made in this very process: the memory may belong to the collator or to a record.
    fields = {name: _private_tensor(value) if isinstance(value, TensorArray) else value for name, value in facts.fields.items()}
    return Batch(fields, replace(facts, fields={}), base)


def _shared_tensors(facts: Delivered) -> dict[str, Any]:
    layout, memory = facts.layout, facts.memory
    if isinstance(memory, torch.Tensor):
        return _device_tensors(facts, memory)
    if layout.prepared is None:
        layout.prepared = [_prepared(field) for field in layout.arrays]
    fields = {}
    for name, shape, dtype, offset, kind in layout.prepared:
        tensor = torch.from_numpy(np.ndarray(shape, dtype, memory, offset))  # half the time of torch.frombuffer and view
        fields[name] = tensor if kind is None else tensor.view(kind)
    if facts.others:
        fields = {name: fields[name] if name in fields else facts.others[name] for name in layout.names}
    return fields


def _device_tensors(facts: Delivered, memory: torch.Tensor) -> dict[str, Any]:
    """Return the fields over memory on a device."""
    fields = {}
    for field in facts.layout.arrays:
        kind: torch.dtype = getattr(torch, field.torch_dtype)
        part = memory[field.offset : field.offset + field.num_elements * kind.itemsize]
        fields[field.name] = part.view(kind).view(field.shape)
    return {name: fields[name] if name in fields else facts.others[name] for name in facts.layout.names}


def _prepared(field: Field) -> tuple[str, tuple[int, ...], np.dtype[Any], int, torch.dtype | None]:
    """Return what making a tensor takes, with its dtype where NumPy has another for the same bits."""
    dtype = np.dtype(field.dtype)
    kind: torch.dtype = getattr(torch, field.torch_dtype)
    is_same = torch.from_numpy(np.empty(0, dtype)).dtype == kind
    return field.name, field.shape, dtype, field.offset, None if is_same else kind


def _private_tensor(field: TensorArray) -> torch.Tensor:
    array = field.array
    tensor: torch.Tensor = as_tensor(array.copy() if len(field.pieces) == 1 else array, field.dtype)
    return tensor


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
