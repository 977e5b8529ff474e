"""What the engine delivers, as a batch of NumPy arrays: for programs that do without torch, whose import takes seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from aioloader.bridge.batch import Batch
from aioloader.engine.channel import Delivered
from aioloader.engine.output import Ready, TensorArray
from aioloader.protocols import Json

__all__ = ["to_array_batch"]


def to_array_batch(facts: Ready | Delivered, base: dict[str, Json]) -> Batch:
    """Return the batch with its arrays, over the same memory where that is the batch's own. Types are those that NumPy has; no fillers."""
    if isinstance(facts, Delivered):
        memory, begin = facts.memory, facts.offset
        arrays = {field.name: np.ndarray(field.shape, field.dtype, memory, begin + field.offset) for field in facts.layout.arrays}
        fields = {name: arrays[name] if name in arrays else facts.others[name] for name in facts.layout.names}
        facts.let_go()
        return Batch(fields, facts, base)
    # Made in this very process: the memory may belong to the collator or to a record.
    fields = {name: value.array.copy() if isinstance(value, TensorArray) else value for name, value in facts.fields.items()}
    return Batch(fields, replace(facts, fields={}), base)
