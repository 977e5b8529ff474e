"""Reading the per-token fields of samples as checked int64 arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioloader.errors import BatchError
from aioloader.protocols import PackedRow

__all__ = ["read_optional", "read_tokens", "require_samples", "to_ints"]


def require_samples(samples: Sequence[Any], where: str) -> None:
    """Refuse an empty micro-batch.

    Raises:
        BatchError: There are no samples.
    """
    if not samples:
        raise BatchError(f"{where}: expected at least one sample, got none; collate only groups that a batching yields")


def read_tokens(sample: Any, where: str) -> NDArray[np.int64]:
    """Return int64[num_tokens], the `input_ids` of a mapping or the sample itself where it is a bare 1-D array.

    Raises:
        BatchError: There are no such tokens.
    """
    if isinstance(sample, PackedRow):
        raise BatchError(f"{where}: expected a plain sample, got a PackedRow; give PretrainCollator packed rows only")
    if not isinstance(sample, Mapping):
        return to_ints(sample, where)
    if "input_ids" not in sample:
        raise BatchError(f"{where}: expected the field 'input_ids', got fields {sorted(map(str, sample))}; add it in preprocess")
    return to_ints(sample["input_ids"], f"{where}['input_ids']")


def read_optional(sample: Any, field: str, num_tokens: int, where: str) -> NDArray[np.int64] | None:
    """Return int64[num_tokens], the named field, or None where the sample does not have it.

    Raises:
        BatchError: The field is not a 1-D integer array of this length.
    """
    if not isinstance(sample, Mapping) or field not in sample:
        return None
    values = to_ints(sample[field], f"{where}[{field!r}]")
    if len(values) != num_tokens:
        raise BatchError(f"{where}[{field!r}]: expected {num_tokens} values, one per token, got {len(values)}; align it in preprocess")
    return values


def to_ints(values: Any, where: str) -> NDArray[np.int64]:
    """Return int64[n] of a 1-D list, array or tensor of integers or booleans; without a copy where it is int64 already.

    Raises:
        BatchError: It is something else.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        got = f"{type(values).__name__} ({error})"
        raise BatchError(f"{where}: expected a 1-D integer array, got {got}; convert it in preprocess") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        got = f"{array.dtype}{list(array.shape)}"
        raise BatchError(f"{where}: expected a 1-D integer array, got {got}; return one flat row of token ids per sample from preprocess")
    return array.astype(np.int64, copy=False)
