"""Collated micro-batches as they leave the engine: arrays with counts, provenance and the state as of their delivery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aioloader.collate.counts import count_tokens
from aioloader.engine.assembler import Turn
from aioloader.errors import AioLoaderError, BatchError
from aioloader.protocols import Collator, Json, RecordId

__all__ = ["Ready", "TensorArray", "collate", "to_arrays"]

_TENSOR_DTYPES = frozenset(
    {"bool", "complex64", "complex128", "float16", "float32", "float64"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""What torch takes from NumPy; arrays of text, objects, dates and the like stay arrays."""


@dataclass(frozen=True, slots=True)
class TensorArray:
    """A tensor as NumPy sees it: `dtype` is torch's name, since NumPy has no bfloat16."""

    array: npt.NDArray[Any]
    dtype: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A collated micro-batch.

    Attributes:
        fields: One `TensorArray` per array or tensor that the collator returned; other values as they are.
        records: (shard, row), seq and sub of each sample, in order.
        state: The rank's state once this micro-batch is delivered.
        num_records: In-flight slots that come free with its delivery.
    """

    fields: dict[str, Any]
    step: int
    lane: int
    epoch: int
    num_tokens: int
    num_padding: int
    num_targets: int
    records: list[tuple[RecordId, int, int]]
    state: Json
    num_records: int


def collate(turn: Turn, collator: Collator, state: Json) -> Ready:
    """Run the collator on one micro-batch.

    Raises:
        BatchError: The collator failed, or returned something else than a mapping.
    """
    batch = turn.batch
    items = batch.group.items
    try:
        fields = collator(list(batch.group.samples))
        if not isinstance(fields, Mapping):
            raise TypeError(f"collate: expected a dict of arrays or tensors, got {type(fields).__name__}; return one array per field.")
        counts = count_tokens(fields)
        arrays = to_arrays(fields)
    except (AioLoaderError, KeyboardInterrupt):  # Ctrl-C, with workers=0
        raise
    except BaseException as error:
        first = items[0] if items else None
        raise BatchError(
            f"the collator failed on micro-batch {batch.step} of lane {batch.lane} ({len(items)} samples): {type(error).__name__}: {error}",
            seq=first.seq if first else None,
            record=first.record if first else None,
            lane=batch.lane,
        ) from error
    return Ready(
        fields=arrays,
        step=batch.step,
        lane=batch.lane,
        epoch=batch.epoch,
        num_tokens=counts.num_tokens,
        num_padding=counts.num_padding,
        num_targets=counts.num_targets,
        records=[(item.record, item.seq, item.sub) for item in items],
        state=state,
        num_records=batch.num_records,
    )


def to_arrays(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with arrays and tensors as `TensorArray`, sharing their memory."""
    return {name: _to_array(value) for name, value in fields.items()}


def _to_array(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return TensorArray(array, str(array.dtype)) if str(array.dtype) in _TENSOR_DTYPES else value
    if type(value).__module__.startswith("torch") and hasattr(value, "detach"):
        return _tensor_to_array(value)
    return value


def _tensor_to_array(tensor: Any) -> TensorArray:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    name = str(plain.dtype).removeprefix("torch.")
    try:
        return TensorArray(plain.numpy(), name)
    except TypeError:  # bfloat16 and the 8-bit floats: carry the bits
        import torch

        bits = {1: torch.uint8, 2: torch.int16}[plain.element_size()]
        return TensorArray(plain.view(bits).numpy(), name)
