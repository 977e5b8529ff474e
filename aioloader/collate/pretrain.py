"""The collator for pretraining: packed rows, or plain samples of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioloader.collate.fields import read_optional, read_tokens, require_samples
from aioloader.collate.labels import IGNORE_INDEX, mask_labels
from aioloader.collate.options import require_bool, require_int
from aioloader.collate.packed import packed_arrays
from aioloader.collate.padded import padded_arrays
from aioloader.protocols import Json, PackedRow

__all__ = ["PretrainCollator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainCollator:
    """Turns packed rows, or plain samples, into arrays for next-token prediction.

    Packed rows give
        `input_ids` int64[rows, seq_len];
        `labels` int64[rows, seq_len];
        `position_ids` int64[rows, seq_len], restarting at 0 in each piece, 0 in padding;
        `document_ids` int32[rows, seq_len], 0, 1, ... inside each row, -1 in padding;
        `cu_seqlens` int32[num_segments + 1], the borders of all pieces over the flattened rows * seq_len tokens, strictly
            increasing from 0 to rows * seq_len; the padding at a row's end is a segment of its own;
        `max_seqlen` int32[], the longest segment.
    `block_diagonal_causal_mask`, `flex_mask_mod` and `varlen_arguments` make of these what attention needs.
    Plain samples (mappings with 1-D `input_ids`, or bare 1-D arrays) are padded on the right to the longest and give
        `input_ids`, `labels` and `attention_mask`, int64[num_samples, max_length].

    A sample's own `labels` (unshifted) replace its tokens as labels, and a zero in its `loss_mask` takes a token out of the
    loss. The first token of every piece or sample and all padding are labelled `ignore_index`. Other fields are left out.

    Attributes:
        pad_token_id: Fills `input_ids` where there is no token.
        ignore_index: The label of what is not a target.
        shift_labels: True if `labels[t]` shall be the target of input t; by default the model shifts.

    Raises:
        ConfigError: An option is of the wrong type.
    """

    pad_token_id: int = 0
    ignore_index: int = IGNORE_INDEX
    shift_labels: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        require_int("PretrainCollator(pad_token_id=...)", self.pad_token_id)
        require_int("PretrainCollator(ignore_index=...)", self.ignore_index)
        require_bool("PretrainCollator(shift_labels=...)", self.shift_labels)

    def __call__(self, samples: Sequence[Any], /) -> dict[str, NDArray[Any]]:
        """Return the arrays of one micro-batch.

        Raises:
            BatchError: A sample is malformed, or packed rows and plain samples are mixed.
        """
        require_samples(samples, "PretrainCollator")
        return self._collate_packed(samples) if isinstance(samples[0], PackedRow) else self._collate_plain(samples)

    def fingerprint(self) -> dict[str, Json]:
        """Return the options that decide the arrays."""
        return {"kind": "PretrainCollator", **asdict(self)}

    def _collate_packed(self, rows: Sequence[Any]) -> dict[str, NDArray[Any]]:
        return packed_arrays(
            rows,
            "PretrainCollator",
            lambda segment: self._labels(segment.fields, segment.tokens, segment.where),
            pad_token_id=self.pad_token_id,
            ignore_index=self.ignore_index,
            shift_labels=self.shift_labels,
        )

    def _collate_plain(self, samples: Sequence[Any]) -> dict[str, NDArray[Any]]:
        places = [f"PretrainCollator: sample {index}" for index in range(len(samples))]
        tokens = [read_tokens(sample, where) for sample, where in zip(samples, places, strict=True)]
        labels = [self._labels(sample, ids, where) for sample, ids, where in zip(samples, tokens, places, strict=True)]
        return padded_arrays(
            tokens,
            labels,
            width=max(map(len, tokens)),
            pad_token_id=self.pad_token_id,
            ignore_index=self.ignore_index,
            shift_labels=self.shift_labels,
        )

    def _labels(self, sample: Any, tokens: NDArray[np.int64], where: str) -> NDArray[np.int64]:
        """Return int64[num_tokens], the labels of one piece or sample before the border rule."""
        if not isinstance(sample, Mapping):
            return tokens
        own = read_optional(sample, "labels", len(tokens), where)
        mask = read_optional(sample, "loss_mask", len(tokens), where)
        labels = tokens if own is None else own
        return labels if mask is None else mask_labels(labels, mask, self.ignore_index)
