"""How many bytes samples take in memory, roughly and at little cost, where they do not travel."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["approximate_nbytes"]

_LOOKED_AT = 4
_DEPTH = 3


def approximate_nbytes(samples: Sequence[Any]) -> int:
    """Return the bytes of all samples, from a look at a few of them: arrays, tensors, text and bytes count, overhead does not."""
    return _nbytes_of_all(samples, _DEPTH)


def _nbytes_of_all(values: Sequence[Any], depth: int) -> int:
    if not values:
        return 0
    looked_at = values[:: max(1, len(values) // _LOOKED_AT)]
    return sum(_nbytes(value, depth) for value in looked_at) * len(values) // len(looked_at)


def _nbytes(value: Any, depth: int) -> int:
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if depth and isinstance(value, Mapping):
        return sum(_nbytes(entry, depth - 1) for entry in value.values())
    if depth and isinstance(value, list | tuple):
        return _nbytes_of_all(value, depth - 1)
    return sys.getsizeof(value, 64)
