"""The loss of a micro-batch, as a sum and a count, so that it can be averaged over the targets of the whole global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from aioloader.errors import ConfigError

__all__ = ["IGNORED_LABEL", "LossFunction", "causal_lm_loss", "check_loss"]

LossFunction: TypeAlias = Callable[[nn.Module, Any], tuple[Tensor, Tensor | int]]
"""(model, batch) -> (sum of the losses of all target tokens, number of target tokens)."""

IGNORED_LABEL = -100
"""Marks a position without a target; torch's and Hugging Face's default."""

_INPUTS = ("input_ids", "position_ids", "attention_mask")


def causal_lm_loss(model: nn.Module, batch: Any, *, labels_shifted: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sum of the next-token losses and the number of targets, both as scalars.

    `labels[i]` is the token at `i`, predicted from the positions before it; where `labels_shifted`, it is the target of position `i`, as
    collators with `shift_labels=True` and `ContextParallel` deliver it: `loss_fn=functools.partial(causal_lm_loss, labels_shifted=True)`.
    `IGNORED_LABEL` is no target.

    Args:
        model: Called with `input_ids` and, where the batch has them, `position_ids` and `attention_mask`; returns
            float[num_rows, seq_len, vocabulary], or an object with these as `logits`.
        batch: Has `input_ids` and `labels`, int64[num_rows, seq_len].
        labels_shifted: Whether the collator has shifted the labels.

    Raises:
        ConfigError: The batch has no labels.
    """
    if "labels" not in batch:
        raise ConfigError("causal_lm_loss", expected="labels in the batch", got="none", do="let the collator make them, or give loss_fn")
    output = model(**{name: batch[name] for name in _INPUTS if name in batch})
    logits: Tensor = getattr(output, "logits", output)
    labels: Tensor = batch["labels"]
    if not labels_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    targets = labels.flatten()
    # float32: the sum over a micro-batch of many tokens loses too much in half precision.
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.long(), ignore_index=IGNORED_LABEL, reduction="sum")
    return loss, torch.count_nonzero(targets != IGNORED_LABEL)


def check_loss(loss: Tensor) -> None:
    """Refuse what is not one number.

    Raises:
        ConfigError: The loss of each token, say.
    """
    if loss.numel() != 1:
        shape = list(loss.shape)
        raise ConfigError("loss_fn", expected="the sum of the losses as one number", got=f"shape {shape}", do='use reduction="sum"')
