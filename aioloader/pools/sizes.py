"""How many bytes samples take in memory, roughly and at little cost, where they do not travel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["approximate_nbytes", "sample_nbytes", "sizes_of"]

_LOOKED_AT = 32
_LOOKED_AT_INSIDE = 4
_DEPTH = 3
_LITTLE_BYTES = 1 << 20
_ALIKE_FACTOR = 2
_UNKNOWN_NBYTES = 64
_NUMBERS = frozenset({bool, int, float})
_PLAIN = _NUMBERS | {str, bytes, bytearray, type(None)}


def approximate_nbytes(samples: Sequence[Any]) -> int:
    """Return the bytes of all samples, from a look at a few of them: arrays, tensors, text and bytes count, overhead does not."""
    return _nbytes_of_all(samples, _DEPTH, _LOOKED_AT)


def sizes_of(records: Sequence[Any]) -> list[int]:
    """Return the bytes of each record: as those that are looked at on the average, if these are alike, or if all take little."""
    number = len(records)
    looked_at = [_nbytes(record, _DEPTH) for record in (*records[:: max(1, number // _LOOKED_AT)], *records[-1:])]
    each = sum(looked_at) // max(1, len(looked_at))
    if number * max(looked_at, default=0) < _LITTLE_BYTES or max(looked_at) < _ALIKE_FACTOR * min(looked_at):
        return [each] * number
    return [_nbytes(record, _DEPTH) for record in records]


def sample_nbytes(sample: Any) -> int:
    """Return the bytes of one sample, or of a list of them; it is called for each record, so the usual kind comes first."""
    try:
        if type(sample) is not dict:
            return _nbytes(sample, _DEPTH)
        total = 0
        for value in sample.values():
            nbytes = getattr(value, "nbytes", None)
            total += nbytes if type(nbytes) is int else _nbytes(value, _DEPTH - 1)
        return total
    except Exception:  # noqa: BLE001 - an attribute of the user's may raise anything
        return _UNKNOWN_NBYTES


def _nbytes_of_all(values: Sequence[Any], depth: int, num_looked_at: int = _LOOKED_AT_INSIDE) -> int:
    if not values:
        return 0
    looked_at = values[:: max(1, len(values) // num_looked_at)]
    return sum([_nbytes(value, depth) for value in looked_at]) * len(values) // len(looked_at)


def _nbytes(value: Any, depth: int) -> int:
    kind = type(value)
    if kind in _PLAIN or not depth:
        return sys.getsizeof(value, _UNKNOWN_NBYTES)
    try:
        if kind is list or kind is tuple:
            return sys.getsizeof(value) if not value or type(value[0]) in _NUMBERS else _nbytes_of_all(value, depth - 1)
        nbytes = getattr(value, "nbytes", None)
        if isinstance(nbytes, int):
            return nbytes
        if isinstance(value, dict):
            return sum([_nbytes(entry, depth - 1) for entry in value.values()])
        return sys.getsizeof(value, _UNKNOWN_NBYTES)
    except Exception:  # noqa: BLE001 - an attribute of the user's may raise anything
        return _UNKNOWN_NBYTES
