"""How long a sample is, and what becomes of one that is too long for every micro-batch."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from aioloader.batching.counters import zero_counters
from aioloader.errors import BatchError, ConfigError, ResumeError
from aioloader.protocols import Item

__all__ = ["OVERFLOWS", "Admission", "Overflow", "require_field"]

Overflow: TypeAlias = Literal["error", "drop", "alone"]
OVERFLOWS: Final = ("error", "drop", "alone")


def require_field(where: str, value: object) -> None:
    """Refuse anything but a field name.

    Raises:
        ConfigError: `value` is empty or no text.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(where, expected="a field name", got=repr(value), do="name the field that tells the length")


class Admission:
    """Measures samples one by one and counts what becomes of those that are empty or longer than `max_length`.

    A sample's length is that of its 1-D `field`, or the field itself where that is a whole number.

    Attributes:
        counters: Under the names that all batchings share.
    """

    __slots__ = ("_field", "_max_length", "_overflow", "_where", "counters")

    def __init__(self, where: str, field: str, max_length: int, overflow: Overflow) -> None:
        self._where = where
        self._field = field
        self._max_length = max_length
        self._overflow = overflow
        self.counters = zero_counters()

    def admit(self, item: Item) -> int:
        """Return the sample's length in tokens, 0 if it is left out: it is empty, or too long and `overflow="drop"`.

        Raises:
            BatchError: It has no length, or is too long and `overflow="error"`; nothing is counted.
        """
        length = self._measure(item)
        if 0 < length <= self._max_length:
            return length
        if length == 0:
            self.counters["empty_samples"] += 1
            return 0
        if self._overflow == "error":
            do = "shorten it in preprocess, or use overflow='drop' or 'alone'"
            raise self._error(item, f"expected at most {self._max_length} tokens, got {length}; {do}")
        kept = self._overflow == "alone"
        name = "alone" if kept else "dropped"
        self.counters[f"{name}_samples"] += 1
        self.counters[f"{name}_tokens"] += length
        return length if kept else 0

    def require_length(self, item: Item, lengths: range) -> int:
        """Return the length of a sample that was made again.

        Raises:
            ResumeError: It is not one of `lengths` any more.
        """
        length = self._measure(item)
        if length not in lengths:
            expected = f"{lengths[0]} tokens" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} tokens"
            what = f"length of sample {item.sub} of the record with seq {item.seq}"
            do = "resume with the data and the preprocess function that the state was saved with"
            raise ResumeError([(what, expected, f"{length} tokens")], do=do)
        return length

    def _measure(self, item: Item) -> int:
        sample, field = item.sample, self._field
        if type(sample) is not dict and not isinstance(sample, Mapping):
            do = f"return {{{field!r}: tokens}} from preprocess"
            raise self._error(item, f"expected a mapping with the 1-D field {field!r}, got {type(sample).__name__}; {do}")
        if field not in sample:
            do = f"add it in preprocess or set {self._where}(field=...)"
            raise self._error(item, f"expected the field {field!r}, got fields {sorted(map(str, sample))}; {do}")
        length = _length(sample[field])
        if length is None or length < 0:
            do = "give the tokens of one sample, or how many they are"
            raise self._error(item, f"expected {field!r} to be 1-D or a whole number >= 0, got {_describe(sample[field])}; {do}")
        return length

    def _error(self, item: Item, message: str) -> BatchError:
        return BatchError(f"{self._where}: {message}", seq=item.seq, record=item.record)


def _length(values: Any) -> int | None:
    """Return what a field says about the length of its sample, None if nothing."""
    # The usual type first: an isinstance of an abstract class costs more than all the rest of a push.
    if type(values) is list:
        return len(values)
    ndim = getattr(values, "ndim", None)
    if ndim == 1:
        return len(values)
    if ndim is None and hasattr(values, "__len__") and hasattr(values, "__getitem__"):
        return None if isinstance(values, (str, bytes, Mapping)) else len(values)
    # What NumPy and torch use for an int is one too; an array that holds one number is a mistake.
    if ndim or isinstance(values, bool | np.bool_):
        return None
    try:
        return operator.index(values)
    except TypeError:
        return None


def _describe(values: Any) -> str:
    if isinstance(values, int | np.integer) and not isinstance(values, bool):
        return str(values)
    shape = getattr(values, "shape", None)
    return type(values).__name__ if shape is None else f"{type(values).__name__} of shape {tuple(shape)}"
