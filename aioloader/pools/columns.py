"""Samples as columns: one buffer per field instead of one per array, so that a block costs per field and not per sample.

Samples that are all mappings with the same keys (or all bare arrays) become columns. A column of arrays or tensors of one
dtype and one shape after the first axis is their concatenation and, where they differ, their lengths; any other column is the
list of its values. What comes back are views into the columns, equal to what went in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Columns", "Concatenation", "from_columns", "split", "to_columns"]

_MIN_SAMPLES = 4  # below this, columns cost more than they save


class Concatenation(NamedTuple):
    """Arrays to be written one after another, along their first axis.

    Attributes:
        arrays: NumPy arrays of one dtype, with the same shape after the first axis.
        lengths: Length of each along the first axis, or the one length that all have.
        torch_dtype: Name of the tensors' dtype, None for NumPy arrays.
    """

    arrays: Sequence[Any]
    lengths: list[int] | int
    torch_dtype: str | None

    @property
    def num_rows(self) -> int:
        """Return the length of the concatenation along its first axis."""
        return self.lengths * len(self.arrays) if isinstance(self.lengths, int) else sum(self.lengths)

    @property
    def nbytes(self) -> int:
        """Return the bytes that the concatenation takes."""
        first = self.arrays[0]
        row_bytes: int = first.dtype.itemsize
        for size in first.shape[1:]:
            row_bytes *= size
        return self.num_rows * row_bytes


class Columns(NamedTuple):
    """Samples by field. `keys` is None for bare arrays; a value is a `Concatenation` or the plain list of values."""

    keys: tuple[str, ...] | None
    values: list[Any]

    @property
    def num_concatenations(self) -> int:
        """Return how many of the values are concatenations."""
        return sum(isinstance(value, Concatenation) for value in self.values)


def to_columns(samples: Sequence[Any]) -> Columns | None:
    """Return the samples as columns, or None where they are of too many kinds or hold nothing that gains by it."""
    if len(samples) < _MIN_SAMPLES:
        return None
    first = samples[0]
    if type(first) is not dict:
        column = _concatenation(samples)
        return None if column is None else Columns(None, [column])
    keys = tuple(first)
    if any(type(sample) is not dict or tuple(sample) != keys for sample in samples):
        return None
    values: list[Any] = []
    for key in keys:
        column_values = [sample[key] for sample in samples]
        values.append(_concatenation(column_values) or column_values)
    columns = Columns(keys, values)
    return columns if columns.num_concatenations else None


def from_columns(keys: tuple[str, ...] | None, columns: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the samples again."""
    if keys is None:
        return list(columns[0])
    return [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]


def split(flat: Any, num_samples: int, lengths: list[int] | int, torch_dtype: str | None) -> list[Any]:
    """Return the arrays of a concatenation `flat` as views of it."""
    if torch_dtype is not None:
        torch = sys.modules["torch"]
        flat = torch.from_numpy(flat)
        if flat.dtype != (dtype := getattr(torch, torch_dtype)):
            flat = flat.view(dtype)
    if isinstance(lengths, int):
        rows = flat.reshape(num_samples, lengths, *flat.shape[1:])
        return list(rows) if torch_dtype is None else list(rows.unbind(0))
    if torch_dtype is not None:
        return list(flat.split(lengths))
    views, at = [], 0
    for length in lengths:
        views.append(flat[at : at + length])
        at += length
    return views


def _concatenation(values: Sequence[Any]) -> Concatenation | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    torch_dtype = None
    torch = sys.modules.get("torch")
    kind = type(values[0])
    if torch is not None and kind is getattr(torch, "Tensor", None):
        torch_dtype = str(values[0].dtype).removeprefix("torch.")
        arrays = _as_arrays(torch, values)
        if arrays is None:
            return None
        values = arrays
    elif kind is not numpy.ndarray:
        return None
    first = values[0]
    dtype, shape = first.dtype, first.shape
    if not shape or dtype.hasobject or dtype.names is not None or dtype.subdtype is not None or dtype.kind in "Mm":
        return None
    trailing = shape[1:]
    for value in values:
        if type(value) is not numpy.ndarray or value.dtype != dtype or value.ndim != len(shape) or value.shape[1:] != trailing:
            return None
    lengths = [len(value) for value in values]
    equal = lengths.count(lengths[0]) == len(lengths)
    return Concatenation(values, lengths[0] if equal else lengths, torch_dtype)


def _as_arrays(torch: Any, tensors: Sequence[Any]) -> list[Any] | None:
    """Return plain CPU tensors of one dtype as NumPy sees them, sharing their memory; None for any other."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if (
            type(tensor) is not torch.Tensor
            or tensor.dtype != dtype
            or tensor.device.type != "cpu"
            or tensor.layout is not torch.strided
            or tensor.requires_grad
            or not tensor.dim()
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
    try:
        return [tensor.numpy() for tensor in tensors]
    except TypeError:  # NumPy has no such dtype (bfloat16): carry the bits
        bits = {1: torch.uint8, 2: torch.int16}.get(dtype.itemsize)
        if bits is None or dtype.is_complex or any(not tensor.is_contiguous() for tensor in tensors):
            return None
        return [tensor.view(bits).numpy() for tensor in tensors]
