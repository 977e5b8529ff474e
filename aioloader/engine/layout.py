"""Where the arrays of a micro-batch lie in its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from aioloader.engine.output import TensorArray

__all__ = ["Field", "Layout"]

_ALIGNMENT = 64


class Field(NamedTuple):
    """Where an array of a micro-batch lies: torch's and NumPy's name of its dtype, its shape, its offset in bytes."""

    name: str
    torch_dtype: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.shape)


class Layout:
    """The fields of a micro-batch; nearly always those of the one before, so it is sent and prepared once.

    Attributes:
        names: All fields, in order; those not in `arrays` are plain values.
        arrays: The fields that are arrays, each at a multiple of 64 bytes.
        nbytes: Of all arrays.
        prepared: For the bridge to keep what it made of this layout.
    """

    __slots__ = ("arrays", "names", "nbytes", "prepared")

    def __init__(self, names: tuple[str, ...], arrays: tuple[Field, ...], nbytes: int) -> None:
        self.names = names
        self.arrays = arrays
        self.nbytes = nbytes
        self.prepared: Any = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Layout:
        """Return the layout of a micro-batch."""
        arrays, nbytes = [], 0
        for name, field in fields.items():
            if isinstance(field, TensorArray):
                arrays.append(Field(name, field.dtype, field.pieces[0].dtype.str, field.shape, nbytes))
                nbytes += field.nbytes + -field.nbytes % _ALIGNMENT
        return cls(tuple(fields), tuple(arrays), nbytes)

    def fits(self, fields: Mapping[str, Any]) -> bool:
        """Return whether this is the layout of a micro-batch."""
        if self.names != tuple(fields):
            return False
        arrays = [field for field in fields.values() if type(field) is TensorArray]
        if len(arrays) != len(self.arrays):
            return False
        for field, array in zip(self.arrays, arrays, strict=True):
            if array is not fields[field.name] or field.shape != array.shape or field.torch_dtype != array.dtype:
                return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.names, self.arrays, self.nbytes)
