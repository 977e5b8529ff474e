"""The collator for samples of one shape: each field is stacked."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aioloader.collate.fields import require_samples
from aioloader.errors import BatchError
from aioloader.protocols import Json
from aioloader.sequences import Rows

__all__ = ["StackCollator"]

_WHERE = "StackCollator"


@dataclass(frozen=True, slots=True)
class StackCollator:
    """Stacks each field of samples that all have the same fields, in the same shapes and dtypes.

    Arrays and tensors of shape [...] give one of shape [num_samples, ...] and of their dtype; ints, floats and bools give an
    array of shape [num_samples]; other values give the list of them.

    The fastest collator: samples that were made by worker processes are stacked without being made again, and large ones are
    written by the workers straight into the batch.

    Raises (when called):
        BatchError: A sample is no mapping, or its fields, shapes or dtypes differ from those of the first.
    """

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return the stacked fields."""
        require_samples(samples, _WHERE)
        first = samples[0]
        if not isinstance(first, Mapping):
            raise BatchError(f"{_WHERE}: expected samples that are dicts, got {type(first).__name__}; return a dict from preprocess")
        for index, sample in enumerate(samples):
            if not isinstance(sample, Mapping) or sample.keys() != first.keys():
                got = f"fields {sorted(map(str, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
                raise BatchError(
                    f"{_WHERE}: expected fields {sorted(map(str, first))} as in the batch's first sample, got {got} in sample {index}; "
                    "return the same fields from preprocess for each record"
                )
        return {name: _stack(name, [sample[name] for sample in samples]) for name in first}

    def collate_columns(self, columns: Mapping[Any, Sequence[Any]]) -> dict[str, Any]:
        """Return the stacked fields of samples that come as columns."""
        return {name: column if isinstance(column, Rows) else _stack(name, list(column)) for name, column in columns.items()}

    def fingerprint(self) -> dict[str, Json]:
        """Return what decides the result."""
        return {"kind": "StackCollator"}


def _stack(name: str, values: list[Any]) -> Any:
    first = values[0]
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(first, torch.Tensor)
    if is_tensor or isinstance(first, np.ndarray):
        kind = torch.Tensor if torch is not None and is_tensor else np.ndarray
        for index, value in enumerate(values):
            if not isinstance(value, kind) or value.shape != first.shape or value.dtype != first.dtype:
                raise BatchError(
                    f"{_WHERE}[{name!r}]: expected {_describe(first)} as in the batch's first sample, got {_describe(value)} in sample "
                    f"{index}; make the shapes equal in preprocess, or use a collator that pads"
                )
        return torch.stack(values) if torch is not None and is_tensor else np.stack(values)
    if all(isinstance(value, bool | int | float | np.generic) for value in values):
        return np.asarray(values)
    return values


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {value.dtype}{list(shape)}"
