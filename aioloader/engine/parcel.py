"""A micro-batch as bytes, for ranks that get it from another rank."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from aioloader.engine.channel import Delivered
from aioloader.engine.layout import Layout
from aioloader.engine.output import Ready, TensorArray
from aioloader.runtime.moving import dumps

__all__ = ["pack", "unpack"]


def pack(batch: Ready | Delivered) -> tuple[bytes, Any]:
    """Return everything but the arrays as bytes, and the memory that the arrays lie in: uint8[layout.nbytes]."""
    if isinstance(batch, Delivered):
        layout, others = batch.layout, batch.others
        memory = batch.memory[batch.offset : batch.offset + layout.nbytes]
        records, state = batch.records_and_state
    else:
        layout = Layout.of(batch.fields)
        memory = _written(batch, layout)
        others = {name: field for name, field in batch.fields.items() if not isinstance(field, TensorArray)}
        records, state = pickle.dumps(batch.provenance), pickle.dumps(batch.state)
    return pickle.dumps((batch.head, layout, dumps(others) if others else b"", records, state)), memory


def unpack(meta: bytes, memory: Any) -> Delivered:
    """Return the micro-batch that `pack` took apart, with its arrays in `memory`."""
    head, layout, others, records, state = pickle.loads(meta)
    return Delivered(head, layout, memory, 0, pickle.loads(others) if others else {}, records, state)


def _written(batch: Ready, layout: Layout) -> Any:
    memory = np.zeros(layout.nbytes, np.uint8)
    for field in layout.arrays:
        if field.num_elements:
            target = np.frombuffer(memory, field.dtype, field.num_elements, field.offset)
            batch.fields[field.name].write(target.reshape(field.shape))
    return memory
