"""Fillers: micro-batches that only keep ranks in step (`end="pad"`). A function of the state, so that a resume makes the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from aioloader.collate.labels import IGNORE_INDEX
from aioloader.errors import BatchError
from aioloader.protocols import Json

__all__ = ["can_fill", "filler_fields"]

_VALUES: Final = {"labels": IGNORE_INDEX, "attention_mask": 1}
"""Where zero would not do: a row that attends to nothing gives NaN."""


def can_fill(lanes: Mapping[str, Json]) -> bool:
    """Return whether a rank whose lanes are in these states has had a micro-batch to model fillers on."""
    return any(lane.get("filler") for lane in lanes.values())


def filler_fields(lanes: Mapping[str, Json], lane: int) -> dict[str, Any]:
    """Return the fields of a filler: names, shapes and dtypes of the lane's last micro-batch, else of another lane's of the rank.

    Labels are all ignored, attention masks all one, and the rest is zero; fields that are no tensors are None.

    Raises:
        BatchError: There was no micro-batch yet.
    """
    outline = lanes[str(lane)]["filler"] or next((one["filler"] for one in lanes.values() if one["filler"]), None)
    if outline is None:
        raise BatchError(
            "end='pad' needs at least one micro-batch on each rank, which fillers are modelled on, got none; "
            "use fewer ranks or lanes, smaller micro-batches, or end='drop'",
            lane=lane,
        )
    num_tokens = next((math.prod(shape) for name, _, shape, *_ in outline if name == "input_ids"), 0)
    totals = {name: largest[0] if largest else num_tokens for name, _, _, *largest in outline}
    return {name: None if dtype is None else _tensor(name, dtype, shape, totals[name]) for name, dtype, shape, *_ in outline}


def _tensor(name: str, dtype: str, shape: list[int], num_tokens: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if name in ("max_seqlen", "global_max_seqlen"):
        return torch.full(shape, num_tokens, dtype=kind)
    if name in ("cu_seqlens", "global_cu_seqlens") and shape[0] > 1:  # documents of one token but for the last
        borders = torch.arange(shape[0], dtype=kind)
        borders[-1] = num_tokens
        return borders
    return torch.full(shape, _VALUES.get(name, 0), dtype=kind)
