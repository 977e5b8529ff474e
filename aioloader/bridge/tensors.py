"""What the engine delivers, as a batch of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from aioloader.bridge.batch import Batch
from aioloader.bridge.filler import filler_fields
from aioloader.engine.channel import Delivered
from aioloader.engine.layout import Field
from aioloader.engine.output import Ready, TensorArray
from aioloader.protocols import Json
from aioloader.sequences import as_tensor

__all__ = ["to_batch"]


def to_batch(facts: Ready | Delivered, base: dict[str, Json]) -> Batch:
    """Return the batch with its arrays as tensors, over the same memory where that is the batch's own.

    `base` is the state that the pass began with; the facts hold what of it is new.
    """
    if isinstance(facts, Delivered):
        batch = Batch(_shared_tensors(facts), facts, base)
        facts.let_go()
    else:  # made in this very process: the memory may belong to the collator or to a record
        fields = {name: _private_tensor(value) if isinstance(value, TensorArray) else value for name, value in facts.fields.items()}
        batch = Batch(fields, replace(facts, fields={}), base)
    if batch.is_filler:
        batch.update(filler_fields(facts.state_loader()()["lanes"], batch.lane))
    return batch


def _shared_tensors(facts: Delivered) -> dict[str, Any]:
    layout, memory, begin = facts.layout, facts.memory, facts.offset
    if type(memory) is torch.Tensor:  # isinstance takes three times as long
        return _device_tensors(facts, memory)
    if layout.prepared is None:
        layout.prepared = [_prepared(field) for field in layout.arrays]
    fields = {}
    for name, shape, dtype, offset, kind in layout.prepared:
        tensor = torch.from_numpy(np.ndarray(shape, dtype, memory, begin + offset))  # half the time of torch.frombuffer and view
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
