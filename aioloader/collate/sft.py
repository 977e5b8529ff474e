"""The collator for supervised fine-tuning: padded samples or packed rows whose prompts are not trained."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from aioloader.collate.fields import read_optional, read_tokens, require_samples
from aioloader.collate.labels import IGNORE_INDEX, mask_labels
from aioloader.collate.options import require_bool, require_int
from aioloader.collate.packed import packed_arrays
from aioloader.collate.padded import padded_arrays
from aioloader.errors import BatchError, ConfigError
from aioloader.protocols import Json, PackedRow

__all__ = ["SftCollator"]

_OVERFLOWS: Final = ("error", "truncate")
_TARGET_FIELDS: Final = ("labels", "loss_mask", "prompt_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftCollator:
    """Pads samples on the right, or takes packed rows, and labels only the tokens that shall be learned.

    A sample is a mapping with 1-D `input_ids` and at least one of `labels` (per token, unshifted), `loss_mask` (per token, zero =
    not trained; multi-turn dialogues use it) and `prompt_length` (the tokens before it are not trained). Where several are
    given, a token is trained only if all of them say so. A sample's first token and all padding are labelled `ignore_index`.

    Plain samples give `input_ids`, `labels` and `attention_mask`, int64[num_samples, width]; the width is the longest sample,
    rounded up to a multiple of `pad_to_multiple_of`. Packed rows give the arrays that `PretrainCollator` lists; their pieces say
    what is trained with `labels` or `loss_mask`, which are cut like their tokens, and lengths are the business of `Pack`.

    Attributes:
        pad_token_id: Fills `input_ids` where there is no token.
        ignore_index: The label of what is not a target.
        max_length: Most tokens per plain sample; None for no limit. A multiple of `pad_to_multiple_of`.
        pad_to_multiple_of: The width is a multiple of this.
        overflow: For samples longer than `max_length`: `"error"` raises, `"truncate"` keeps the first `max_length` tokens.
        shift_labels: True if `labels[t]` shall be the target of input t; by default the model shifts.

    Raises:
        ConfigError: An option is out of range or unknown.
    """

    pad_token_id: int
    ignore_index: int = IGNORE_INDEX
    max_length: int | None = None
    pad_to_multiple_of: int = 1
    overflow: Literal["error", "truncate"] = "error"
    shift_labels: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        require_int("SftCollator(pad_token_id=...)", self.pad_token_id)
        require_int("SftCollator(ignore_index=...)", self.ignore_index)
        require_int("SftCollator(pad_to_multiple_of=...)", self.pad_to_multiple_of, minimum=1)
        require_bool("SftCollator(shift_labels=...)", self.shift_labels)
        if self.overflow not in _OVERFLOWS:
            raise ConfigError("SftCollator(overflow=...)", expected="'error' or 'truncate'", got=repr(self.overflow), do="use one of these")
        if self.max_length is None:
            return
        require_int("SftCollator(max_length=...)", self.max_length, minimum=1)
        if self.max_length % self.pad_to_multiple_of:
            expected = f"a multiple of pad_to_multiple_of={self.pad_to_multiple_of}"
            do = "round it, as padding would exceed it"
            raise ConfigError("SftCollator(max_length=...)", expected=expected, got=self.max_length, do=do)

    def __call__(self, samples: Sequence[Any], /) -> dict[str, NDArray[Any]]:
        """Return the arrays of one micro-batch.

        Raises:
            BatchError: A sample is malformed, says nothing about its targets, or is too long and `overflow="error"`; or packed rows and
                plain samples are mixed.
        """
        require_samples(samples, "SftCollator")
        return self._collate_packed(samples) if isinstance(samples[0], PackedRow) else self._collate_plain(samples)

    def fingerprint(self) -> dict[str, Json]:
        """Return the options that decide the arrays."""
        return {"kind": "SftCollator", **asdict(self)}

    def _collate_packed(self, rows: Sequence[Any]) -> dict[str, NDArray[Any]]:
        return packed_arrays(
            rows,
            "SftCollator",
            lambda segment: self._labels(segment.fields, segment.tokens, segment.where),
            pad_token_id=self.pad_token_id,
            ignore_index=self.ignore_index,
            shift_labels=self.shift_labels,
        )

    def _collate_plain(self, samples: Sequence[Any]) -> dict[str, NDArray[Any]]:
        return self.pad([self.read(sample, f"SftCollator: sample {index}") for index, sample in enumerate(samples)])

    def pad(self, rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> dict[str, NDArray[Any]]:
        """Return the arrays of plain samples, given the tokens and labels of each."""
        longest = max(len(tokens) for tokens, _ in rows)
        return padded_arrays(
            [tokens for tokens, _ in rows],
            [labels for _, labels in rows],
            width=-(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of,
            pad_token_id=self.pad_token_id,
            ignore_index=self.ignore_index,
            shift_labels=self.shift_labels,
        )

    def read(self, sample: Any, where: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sample's tokens and unshifted labels, int64[num_tokens] each, within `max_length`.

        Raises:
            BatchError: As calling it; begins with `where`.
        """
        tokens = read_tokens(sample, where)
        labels = self._labels(sample, tokens, where)
        limit = self.max_length
        if limit is not None and len(tokens) > limit and self.overflow == "error":
            raise BatchError(
                f"{where}['input_ids']: expected at most max_length={limit} tokens, got {len(tokens)}; "
                "shorten it in preprocess, raise max_length, or use overflow='truncate'"
            )
        return tokens[:limit], labels[:limit]

    def _labels(self, sample: Any, tokens: NDArray[np.int64], where: str) -> NDArray[np.int64]:
        if not isinstance(sample, Mapping) or not any(field in sample for field in _TARGET_FIELDS):
            got = sorted(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
            raise BatchError(f"{where}: expected 'input_ids' and one of {', '.join(_TARGET_FIELDS)}, got {got}; say what to train on")
        own = read_optional(sample, "labels", len(tokens), where)
        labels = tokens if own is None else own
        mask = read_optional(sample, "loss_mask", len(tokens), where)
        if mask is not None:
            labels = mask_labels(labels, mask, self.ignore_index)
        if "prompt_length" in sample:
            length = _prompt_length(sample["prompt_length"], len(tokens), where)
            labels = mask_labels(labels, np.arange(len(tokens)) >= length, self.ignore_index)
        return labels


def _prompt_length(value: Any, num_tokens: int, where: str) -> int:
    """Return the prompt's length as an int between 0 and `num_tokens`; 0-d arrays and tensors count as ints."""
    try:
        length = operator.index(value)
    except TypeError:
        length = -1
    if not 0 <= length <= num_tokens:
        raise BatchError(f"{where}['prompt_length']: expected an int from 0 to its {num_tokens} tokens, got {value!r}; correct it")
    return length
