"""The collator for preference pairs: two answers to one prompt, of which one is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

from aioloader.collate.fields import require_samples
from aioloader.collate.sft import SftCollator
from aioloader.errors import BatchError, ConfigError
from aioloader.protocols import Json

__all__ = ["PreferenceCollator"]

_SIDES: Final = ("chosen", "rejected")


@dataclass(frozen=True, slots=True)
class PreferenceCollator:
    """Pads pairs of samples to one width: rows 0 to n - 1 are the chosen ones, rows n to 2n - 1 the rejected ones, in the same order.

    A sample is a mapping with `chosen` and `rejected`, each of which is what `SftCollator` takes: 1-D `input_ids`, prompt included, and
    what of them is trained. Gives `input_ids`, `labels` and `attention_mask`, int64[2 * num_samples, width]: one forward pass serves both
    sides, as losses over pairs (DPO and its like) and reward models want it.

    Args:
        answers: How each side is read and padded.

    Raises:
        ConfigError: `answers` is something else.
    """

    answers: SftCollator

    def __post_init__(self) -> None:
        """Check the options."""
        if not isinstance(self.answers, SftCollator):
            raise ConfigError(
                "PreferenceCollator(answers)", expected="an SftCollator", got=repr(self.answers), do="pass SftCollator(pad_token_id=...)"
            )

    def __call__(self, samples: Sequence[Any], /) -> dict[str, NDArray[Any]]:
        """Return the arrays of one micro-batch.

        Raises:
            BatchError: A pair lacks a side, or a side is malformed, says nothing about its targets, or is too long.
        """
        require_samples(samples, "PreferenceCollator")
        places = [(side, index) for side in _SIDES for index in range(len(samples))]
        return self.answers.pad([self.answers.read(_side(samples[index], side, index), _where(side, index)) for side, index in places])

    def fingerprint(self) -> dict[str, Json]:
        """Return the options that decide the arrays."""
        return {"kind": "PreferenceCollator", "answers": self.answers.fingerprint()}


def _side(pair: Any, side: str, index: int) -> Any:
    if not isinstance(pair, Mapping) or side not in pair:
        got = sorted(map(str, pair)) if isinstance(pair, Mapping) else type(pair).__name__
        raise BatchError(f"PreferenceCollator: pair {index}: expected 'chosen' and 'rejected', got {got}; return both from preprocess")
    return pair[side]


def _where(side: str, index: int) -> str:
    return f"PreferenceCollator: pair {index}[{side!r}]"
