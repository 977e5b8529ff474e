"""Trainer with a precision manager: masters in the checkpoint, steps that the manager skips, options that exclude each other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aioloader.errors import ConfigError, ResumeError
from aioloader.training import StepReport, Trainer
from aioloader.training.loss import causal_lm_loss
from aioloader.training.precision.manager import MixedPrecisionManager
from aioloader.training.precision.transforms import ClipGradNorm, SkipNonFinite
from tests.training.fake_loader import FakeLoader, TinyModel, language_batches


class Setup:
    """A trainer with a manager, and what it leaves."""

    def __init__(self, **options: Any) -> None:
        self.model = TinyModel()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        transforms = options.pop("transforms", (SkipNonFinite(), ClipGradNorm(1.0)))
        self.manager = MixedPrecisionManager(self.model, optimizer, transforms=transforms, scheduler=scheduler)
        self.reports: list[StepReport] = []
        self.loader = FakeLoader(language_batches(24), 2)
        options = {"max_steps": 8, "precision": self.manager, "on_step": self.reports.append, **options}
        self.trainer = Trainer(self.model, self.loader, **options)

    def masters(self) -> dict[str, Tensor]:
        return {name: master.detach().clone() for name, master in self.manager.masters().items()}


@pytest.mark.parametrize("checkpoint_async", [False, True])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, *, checkpoint_async: bool) -> None:
    whole = Setup()
    whole.trainer.train()
    options = {"checkpoint_dir": tmp_path, "checkpoint_async": checkpoint_async}
    first = Setup(max_steps=3, **options)
    first.trainer.train()
    second = Setup(**options)
    second.trainer.train()
    found = [(report.step, report.loss, report.grad_norm, report.lr) for report in first.reports + second.reports]
    assert found == [(report.step, report.loss, report.grad_norm, report.lr) for report in whole.reports]
    assert len({report.loss for report in whole.reports}) == 8
    assert next(second.model.parameters()).dtype == torch.bfloat16
    masters = second.masters()
    assert all(torch.equal(value, masters[name]) for name, value in whole.masters().items())


def test_a_step_that_is_not_finite_is_skipped_counted_and_gone_on_from() -> None:
    num_calls = 0

    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        nonlocal num_calls
        num_calls += 1
        loss, count = causal_lm_loss(model, batch)
        return (loss * math.inf if num_calls == 3 else loss), count

    setup = Setup(loss_fn=loss_fn, max_steps=4)
    result = setup.trainer.train()
    assert [report.skipped for report in setup.reports] == [False, True, False, False]
    assert (result.num_skipped, setup.manager.num_skipped) == (1, 1)
    assert all(bool(value.isfinite().all()) for value in setup.masters().values())


def test_without_clipping_the_norm_is_not_known() -> None:
    setup = Setup(transforms=(), max_steps=1)
    setup.trainer.train()
    assert math.isnan(setup.reports[0].grad_norm)


def test_a_checkpoint_without_masters_is_refused(tmp_path: Path) -> None:
    model = TinyModel().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    Trainer(model, FakeLoader(language_batches(4), 1), optimizer, max_steps=1, checkpoint_dir=tmp_path).train()
    with pytest.raises(ResumeError, match=r"precision: expected 'MixedPrecisionManager' \(this loader\), got 'none' \(the state\)"):
        Setup(checkpoint_dir=tmp_path).trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_grad_norm": 1.0},
            "max_grad_norm: expected none with a precision manager, got 1.0; give the manager the transform ClipGradNorm",
        ),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)},
            "optimizer: expected none with a precision manager, which owns it, got one",
        ),
    ],
)
def test_what_the_manager_has_is_not_given_twice(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Setup(**options)
