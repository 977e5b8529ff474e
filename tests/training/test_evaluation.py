"""Evaluation: every sample once, weighted by tokens, and training goes on as if nothing had been. Several ranks: test_run.py."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aioloader import FixedBatch, Loader, Mesh, StackCollator
from aioloader.errors import ConfigError
from aioloader.training import StepReport, Trainer
from aioloader.training.evaluation import evaluate
from aioloader.training.loss import causal_lm_loss
from tests.training.fake_loader import FakeBatch, FakeLoader, TinyModel, language_batch, language_batches


def correct(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Ids 0 and 1 are correct."""
    return (batch["id"] < 2).sum(), len(batch["id"])


def id_loader(mesh: Mesh, **options: Any) -> Loader:
    records = [{"id": number} for number in range(10)]
    return Loader(records, batch=FixedBatch(1), collate=StackCollator(), mesh=mesh, workers=0, **options)


def test_ten_samples_on_three_ranks_count_ten() -> None:
    """K65: the ranks' own sums, of which there are three with four micro-batches each, two of them fillers."""
    found = []
    for rank in range(3):
        with id_loader(Mesh(dp_rank=rank, dp_size=3), end="pad") as loader:
            evaluation = evaluate(nn.Identity(), loader, correct, mesh=Mesh())
            assert evaluation is not None
            found.append((evaluation.num_targets, evaluation.loss * evaluation.num_targets, evaluation.num_batches))
    assert [sum(numbers) for numbers in zip(*found, strict=True)] == [10, 2, 10]


def test_records_that_are_repeated_to_even_out_ranks_are_refused() -> None:
    with (
        id_loader(Mesh(dp_rank=1, dp_size=3), end="repeat") as loader,
        pytest.raises(ConfigError, match=r'evaluate\(loader=\): expected every record once, got 1 of them twice; use Loader\(end="pad"\)'),
    ):
        evaluate(nn.Identity(), loader, correct, mesh=Mesh())


def test_the_loss_is_the_mean_over_all_targets() -> None:
    model, batches = TinyModel(), language_batches(5)
    with torch.no_grad():
        pairs = [causal_lm_loss(model, batch) for batch in batches]
    found = evaluate(model, FakeLoader(batches, 1))
    assert found is not None
    assert found.loss == pytest.approx(sum(float(loss) for loss, _ in pairs) / sum(int(count) for _, count in pairs), rel=1e-6)
    assert (found.num_batches, found.num_tokens) == (5, sum(batch.num_tokens for batch in batches))


def test_each_evaluation_sees_the_same_data() -> None:
    with Loader([{"id": number} for number in range(10)], batch=FixedBatch(2), collate=StackCollator(), workers=0) as loader:
        found = [evaluate(nn.Identity(), loader, correct, max_batches=number) for number in (2, 2, None)]
    assert [one and (one.loss, one.num_targets) for one in found] == [(0.5, 4), (0.5, 4), (0.2, 10)]


def test_no_target_gives_no_loss() -> None:
    filler = language_batch(0)
    filler.is_filler = True
    found = evaluate(TinyModel(), FakeLoader([filler], 1))
    assert found is not None
    assert math.isnan(found.loss)
    assert (found.num_targets, found.num_tokens, found.num_batches) == (0, 0, 0)


def test_modes_come_back_module_by_module_also_after_a_failure() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model.train()
    model.get_submodule("1").eval()
    before = [module.training for module in model.modules()]
    seen: list[bool] = []

    def fail(model: nn.Module, batch: Any) -> Any:
        seen.append(any(module.training for module in model.modules()) or torch.is_grad_enabled())
        raise ArithmeticError("in the loss")

    with pytest.raises(ArithmeticError, match="in the loss"):
        evaluate(model, FakeLoader(language_batches(1), 1), fail)
    assert seen == [False]
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


def test_a_loss_that_is_not_a_sum_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_fn: expected the sum of the losses as one number, got shape \[2\]"):
        evaluate(TinyModel(), FakeLoader(language_batches(1), 1), lambda model, batch: (torch.zeros(2), 1))


def test_once_told_to_stop_there_is_no_result() -> None:
    answers = iter([False, True])
    assert evaluate(TinyModel(), FakeLoader(language_batches(5), 1), should_stop=lambda: next(answers)) is None


def test_max_batches_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\(max_batches=\): expected 1 or more, or None for all, got 0"):
        evaluate(TinyModel(), FakeLoader(language_batches(1), 1), max_batches=0)


class Noisy(nn.Module):
    """Draws from all global generators in both modes, and keeps a statistic of what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyModel()
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(17)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        shift = random.random() + float(np.random.random()) + float(torch.rand(()))
        logits: Tensor = self.norm(self.drop(self.inner(input_ids, position_ids) + shift).transpose(1, 2)).transpose(1, 2)
        return logits


def run(**options: Any) -> tuple[list[StepReport], dict[str, Tensor]]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = Noisy()
    reports: list[StepReport] = []
    loader = FakeLoader(language_batches(8), 1)
    Trainer(model, loader, torch.optim.AdamW(model.parameters()), max_steps=6, on_step=reports.append, **options).train()
    return reports, model.state_dict()


@pytest.fixture
def generators_kept() -> Any:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@pytest.mark.usefixtures("generators_kept")
def test_a_run_with_evaluation_trains_bit_for_bit_like_one_without() -> None:
    plain, plain_state = run()
    eval_loader = FakeLoader([FakeBatch(language_batch(index), index=index) for index in range(20, 23)], 1)
    with_evaluation, state = run(eval_loader=eval_loader, eval_every=2)
    assert [report.loss for report in with_evaluation] == [report.loss for report in plain]
    assert [report.grad_norm for report in with_evaluation] == [report.grad_norm for report in plain]
    assert all(torch.equal(value, state[name]) for name, value in plain_state.items())
    assert [report.step for report in with_evaluation if report.evaluation is not None] == [2, 4, 6]
    assert len({report.evaluation.loss for report in with_evaluation if report.evaluation is not None}) == 3
    assert eval_loader.num_closed == 1
