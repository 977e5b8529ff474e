"""Labels for next-token prediction.

Unshifted (the default; the model shifts): `labels[t]` is the token at t itself. Shifted: `labels[t]` is the target of input t.
A document's first token is never a target, as nothing stands before it to predict it from; so a border between documents
is never crossed, and the number of labels that are not ignored is the number of targets in both forms.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["IGNORE_INDEX", "mask_labels", "shift_left"]

IGNORE_INDEX: Final = -100
"""The label that `torch.nn.functional.cross_entropy` ignores by default."""


def mask_labels(labels: NDArray[np.int64], mask: NDArray[np.integer[Any] | np.bool_], ignore_index: int) -> NDArray[np.int64]:
    """Return the labels with `ignore_index` where `mask` is zero."""
    return np.where(mask != 0, labels, ignore_index)


def shift_left(labels: NDArray[np.int64], ignore_index: int) -> NDArray[np.int64]:
    """Return the labels moved one place towards the start of the last axis; the last place is `ignore_index`."""
    shifted = np.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    return shifted
