"""Samples of different lengths as the rows of rectangular arrays, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioloader.collate.labels import shift_left

__all__ = ["pad_right", "padded_arrays"]


def padded_arrays(
    tokens: Sequence[NDArray[np.int64]],
    labels: Sequence[NDArray[np.int64]],
    *,
    width: int,
    pad_token_id: int,
    ignore_index: int,
    shift_labels: bool,
) -> dict[str, NDArray[Any]]:
    """Return `input_ids`, `labels` and `attention_mask`, int64[num_samples, width] each.

    `labels` come unshifted; those of the first tokens and of padding become `ignore_index`, then they are shifted if asked for.
    """
    targets = pad_right(labels, width, ignore_index)
    targets[:, :1] = ignore_index
    lengths = np.array([len(row) for row in tokens])
    return {
        "input_ids": pad_right(tokens, width, pad_token_id),
        "labels": shift_left(targets, ignore_index) if shift_labels else targets,
        "attention_mask": (np.arange(width) < lengths[:, None]).astype(np.int64),
    }


def pad_right(rows: Sequence[NDArray[np.int64]], width: int, fill: int) -> NDArray[np.int64]:
    """Return a new int64[len(rows), width]: each row followed by `fill`; no row may be longer than `width`."""
    if all(len(row) == width for row in rows):
        return np.stack(rows)
    padded = np.full((len(rows), width), fill, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
