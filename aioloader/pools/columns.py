"""Samples as columns: one buffer per field instead of one per array, so that a block costs per field and not per sample.

Samples that are all dicts with the same keys (or all bare arrays) become columns. A column of arrays or tensors of one dtype
and one shape after the first axis is their concatenation and, where they differ, their lengths; any other column is the list
of its values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, contains, itemgetter
from typing import Any, NamedTuple

from aioloader.sequences import Column, RaggedRows, Rows

__all__ = ["Columns", "Concatenation", "from_flat", "to_columns"]

_dtype_of = attrgetter("dtype")  # with `map` half the time of a comprehension
_shape_of = attrgetter("shape")


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
    def is_even(self) -> bool:
        """Return whether all arrays have one shape."""
        return isinstance(self.lengths, int)

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

    keys: tuple[Any, ...] | None
    values: list[Any]

    @property
    def num_concatenations(self) -> int:
        """Return how many of the values are concatenations."""
        return sum(isinstance(value, Concatenation) for value in self.values)


def to_columns(samples: Sequence[Any]) -> Columns | None:
    """Return the samples as columns, or None where they are of too many kinds or hold nothing that gains by it."""
    if not samples:
        return None
    first = samples[0]
    if type(first) is not dict:
        column = _concatenation(samples)
        return None if column is None else Columns(None, [column])
    keys = tuple(first)
    if not keys or not _all_same(map(type, samples), dict, len(samples)) or not _have_keys(samples, keys):
        return None
    values: list[Any] = []
    for key in keys:
        column_values = list(map(itemgetter(key), samples))
        values.append(_concatenation(column_values) or column_values)
    columns = Columns(keys, values)
    return columns if columns.num_concatenations else None


def from_flat(flat: Any, num_samples: int, lengths: list[int] | int, torch_dtype: str | None) -> Column:
    """Return the column whose concatenation is `flat`."""
    if isinstance(lengths, int):
        return Rows([flat.reshape(num_samples, lengths, *flat.shape[1:])], torch_dtype)
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length
    return RaggedRows(flat, starts, lengths, torch_dtype)


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
    first, num_values = values[0], len(values)
    dtype, shape = first.dtype, first.shape
    if not shape or dtype.hasobject or dtype.names is not None or dtype.subdtype is not None or dtype.kind in "Mm":
        return None
    if not _all_same(map(type, values), numpy.ndarray, num_values) or not _all_same(map(_dtype_of, values), dtype, num_values):
        return None
    shapes = list(map(_shape_of, values))
    if shapes.count(shape) == num_values:
        return Concatenation(values, shape[0], torch_dtype)
    trailing = shape[1:]
    if any(len(other) != len(shape) or other[1:] != trailing for other in shapes):
        return None
    return Concatenation(values, [other[0] for other in shapes], torch_dtype)


def _have_keys(samples: Sequence[dict[Any, Any]], keys: tuple[Any, ...]) -> bool:
    """Return whether all samples have these fields, in this order."""
    if len(keys) == 1:
        return _all_same(map(len, samples), 1, len(samples)) and all(map(contains, samples, repeat(keys[0])))
    return _all_same(map(tuple, samples), keys, len(samples))


def _all_same(values: Any, wanted: Any, number: int) -> bool:
    return [*values].count(wanted) == number  # three times as fast as a loop that stops early


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
