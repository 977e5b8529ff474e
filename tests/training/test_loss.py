"""causal_lm_loss: sums over next tokens, counts them, and ignores what is no target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aioloader.errors import ConfigError
from aioloader.training.loss import causal_lm_loss


class Fixed(nn.Module):
    """Returns given logits and remembers how it was called."""

    def __init__(self, logits: Tensor, *, wrapped: bool) -> None:
        super().__init__()
        self.logits = logits
        self.wrapped = wrapped
        self.inputs: dict[str, Any] = {}

    def forward(self, **inputs: Any) -> Any:
        self.inputs = inputs
        return SimpleNamespace(logits=self.logits) if self.wrapped else self.logits


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_label_is_predicted_from_the_position_before(wrapped: bool, dtype: torch.dtype) -> None:
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.tensor([[0, 1, -100, 3], [-100, 4, 2, -100]])
    loss, num_targets = causal_lm_loss(Fixed(logits, wrapped=wrapped), {"input_ids": labels.abs(), "labels": labels})
    log_probabilities = logits.float().log_softmax(-1)
    expected = -sum(log_probabilities[row, place - 1, labels[row, place]] for row, place in ((0, 1), (0, 3), (1, 1), (1, 2)))
    assert num_targets == 4
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.as_tensor(expected))


def test_labels_that_the_collator_has_shifted_are_not_shifted_again() -> None:
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, -100, 3], [-100, 4, 2, -100]])
    shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], dim=1)
    batch = {"input_ids": labels.abs(), "labels": labels}
    expected = causal_lm_loss(Fixed(logits, wrapped=False), batch)
    found = causal_lm_loss(Fixed(logits, wrapped=False), {**batch, "labels": shifted}, labels_shifted=True)
    torch.testing.assert_close(found, expected)
    assert found[1] == 4


def test_the_model_gets_what_the_batch_has() -> None:
    model = Fixed(torch.zeros(1, 2, 3), wrapped=False)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    causal_lm_loss(model, {"input_ids": tokens, "labels": tokens, "document_ids": tokens})
    assert list(model.inputs) == ["input_ids"]
    causal_lm_loss(model, {"attention_mask": tokens, "input_ids": tokens, "labels": tokens, "position_ids": tokens})
    assert set(model.inputs) == {"input_ids", "position_ids", "attention_mask"}


def test_without_targets_the_loss_is_zero_and_has_a_zero_gradient() -> None:
    logits = torch.zeros(1, 2, 3, requires_grad=True)
    labels = torch.full((1, 2), -100)
    loss, num_targets = causal_lm_loss(Fixed(logits, wrapped=False), {"input_ids": labels, "labels": labels})
    loss.backward()  # type: ignore[no-untyped-call]
    assert (loss.item(), int(num_targets)) == (0.0, 0)
    assert logits.grad is not None
    assert not logits.grad.any()


def test_labels_are_required() -> None:
    with pytest.raises(ConfigError, match="causal_lm_loss: expected labels in the batch, got none"):
        causal_lm_loss(nn.Identity(), {"input_ids": torch.zeros(1, 2)})
