"""How many tokens of a micro-batch are real, padding, and targets of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from aioloader.collate.labels import IGNORE_INDEX

__all__ = ["TokenCounts", "count_tokens"]


class TokenCounts(NamedTuple):
    """Real tokens, padding, and labels that the loss counts; all zero for a batch without tokens."""

    num_tokens: int
    num_padding: int
    num_targets: int


def count_tokens(batch: Mapping[str, Any], *, ignore_index: int = IGNORE_INDEX) -> TokenCounts:
    """Return the token counts of a collated micro-batch of NumPy arrays or torch tensors, on any device.

    Real tokens are counted by the first field that the batch has of `attention_mask` (nonzero = real), `document_ids`
    (negative = padding) and `input_ids` (all real). Targets are the `labels` other than `ignore_index`; none without labels.
    """
    num_real, size = _count_real(batch)
    labels = _array(batch["labels"]) if "labels" in batch else None
    num_targets = 0 if labels is None else int((labels != ignore_index).sum())
    return TokenCounts(num_real, size - num_real, num_targets)


def _count_real(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of real tokens and of all tokens."""
    if "attention_mask" in batch:
        mask = _array(batch["attention_mask"])
        return int((mask != 0).sum()), math.prod(mask.shape)
    if "document_ids" in batch:
        ids = _array(batch["document_ids"])
        return int((ids >= 0).sum()), math.prod(ids.shape)
    size = math.prod(_array(batch["input_ids"]).shape) if "input_ids" in batch else 0
    return size, size


def _array(values: Any) -> Any:
    """Return `values` if it is array-like already (so that a tensor stays on its device), else an array of it."""
    return values if hasattr(values, "shape") else np.asarray(values)
