"""Trainer: options that are checked, one rank alone, and a real start with torchrun."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.training import StepReport, Trainer, latest_checkpoint
from tests.training.fake_loader import FakeBatch, FakeLoader, TinyModel, language_batch, language_batches
from tests.training.ranks import ROOT


class Setup:
    """A trainer with its parts at hand."""

    def __init__(self, batches: list[FakeBatch] | None = None, *, num_lanes: int = 1, **options: Any) -> None:
        self.model = TinyModel()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = FakeLoader(batches if batches is not None else language_batches(8), num_lanes)
        self.reports: list[StepReport] = []
        self.trainer = Trainer(self.model, self.loader, self.optimizer, **{"max_steps": 4, "on_step": self.reports.append, **options})

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def without_targets(index: int) -> FakeBatch:
    batch = language_batch(index)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    return batch


def test_a_step_takes_the_lanes_of_the_rank() -> None:
    setup = Setup(num_lanes=4)
    result = setup.trainer.train()
    assert (result.step, result.stopped_by) == (2, "data")
    assert [len(report.records) for report in setup.reports] == [4, 4]
    assert result.last_loss == setup.reports[-1].loss
    assert result.checkpoint is None


def test_accumulation_can_be_given() -> None:
    setup = Setup(num_lanes=4, accumulation=2)
    assert setup.trainer.train().step == 4


def test_the_loss_is_the_mean_over_all_targets() -> None:
    setup = Setup(num_lanes=4, max_steps=1)
    total, num_targets = 0.0, 0
    with torch.no_grad():
        for batch in language_batches(4):
            logits = setup.model(batch["input_ids"], batch["position_ids"])
            targets = batch["labels"][:, 1:]
            losses = -logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
            total += float(losses[targets >= 0].sum())
            num_targets += int((targets >= 0).sum())
    setup.trainer.train()
    assert setup.reports[0].num_targets == num_targets
    assert setup.reports[0].loss == pytest.approx(total / num_targets, rel=1e-6)
    assert setup.reports[0].num_tokens == sum(batch.num_tokens for batch in language_batches(4))


def test_a_step_without_targets_changes_nothing_and_is_reported(tmp_path: Path) -> None:
    scheduler_steps: list[int] = []

    class Scheduler:
        def step(self) -> None:
            scheduler_steps.append(1)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    setup = Setup([without_targets(0), language_batch(1)], max_steps=1, checkpoint_dir=tmp_path, scheduler=Scheduler())
    before = setup.parameters()
    result = setup.trainer.train()
    assert all(torch.equal(one, other) for one, other in zip(before, setup.parameters(), strict=True))
    assert (result.step, result.num_skipped, result.last_loss) == (1, 1, None)
    assert setup.reports[0].skipped
    assert math.isnan(setup.reports[0].loss)
    assert scheduler_steps == []

    resumed = Setup([without_targets(0), language_batch(1)], max_steps=2, checkpoint_dir=tmp_path, scheduler=Scheduler())
    result = resumed.trainer.train()
    assert (result.step, result.num_steps, result.num_skipped) == (2, 1, 1)
    assert not resumed.reports[0].skipped
    assert scheduler_steps == [1]


def test_filler_is_counted_but_not_trained_on() -> None:
    filler = language_batch(1)
    filler.is_filler, filler.num_tokens = True, 0
    with_filler = Setup([language_batch(0), filler], num_lanes=2, max_steps=1)
    without = Setup([language_batch(0)], max_steps=1)
    with_filler.trainer.train()
    without.trainer.train()
    assert all(torch.equal(one, other) for one, other in zip(with_filler.parameters(), without.parameters(), strict=True))
    assert with_filler.reports[0].num_targets == without.reports[0].num_targets


def test_gradients_are_clipped_after_scaling() -> None:
    setup = Setup(max_steps=1, max_grad_norm=1e-3)
    before = setup.parameters()
    setup.trainer.train()
    moved = torch.cat([(one - other).flatten() for one, other in zip(before, setup.parameters(), strict=True)])
    assert setup.reports[0].grad_norm > 1e-3
    assert float(moved.norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_parameters_that_were_never_used_are_left_alone() -> None:
    setup = Setup()
    before = setup.model.unused.weight.detach().clone()
    setup.trainer.train()
    assert torch.equal(setup.model.unused.weight, before)
    assert setup.model.unused.weight.grad is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_loader_is_closed_whatever_ends_training(error: type[BaseException]) -> None:
    def fail(report: StepReport) -> None:
        raise error("in step 1")

    setup = Setup(on_step=fail)
    with pytest.raises(error, match="in step 1"):
        setup.trainer.train()
    assert setup.loader.num_closed == 1


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    first = Setup(max_steps=2, checkpoint_dir=tmp_path, checkpoint_every=1)
    assert first.trainer.train().checkpoint == latest_checkpoint(tmp_path)
    second = Setup(max_steps=2, checkpoint_dir=tmp_path)
    result = second.trainer.train()
    assert (result.step, result.num_steps, result.checkpoint) == (2, 0, tmp_path / "step_00000002")
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


def test_starting_afresh_over_old_checkpoints_is_refused(tmp_path: Path) -> None:
    Setup(max_steps=1, checkpoint_dir=tmp_path).trainer.train()
    with pytest.raises(ConfigError, match=r"resume=False: expected a checkpoint_dir without checkpoints, got step 1 in"):
        Setup(max_steps=1, checkpoint_dir=tmp_path, resume=False).trainer.train()


def test_a_loss_that_is_not_a_sum_is_refused() -> None:
    def per_token(model: Any, batch: Any) -> Any:
        return model(batch["input_ids"], batch["position_ids"]).sum(-1), 1

    with pytest.raises(ConfigError, match=r"loss_fn: expected the sum of the losses as one number, got shape \[2, 12\]"):
        Setup(loss_fn=per_token).trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_every": 5}, "eval_every: expected eval_loader and eval_every, or neither, got only one of them"),
        ({"eval_every": 0, "eval_loader": FakeLoader([], 1)}, "eval_every: expected an integer, 1 or more, got 0"),
        ({"rank_table_every": 0}, "rank_table_every: expected an integer, 1 or more, got 0"),
        ({"prefetch_depth": -1}, "prefetch_depth: expected an integer, 0 or more, got -1"),
        ({"max_steps": -1}, "max_steps: expected an integer, 0 or more, got -1"),
        ({"accumulation": 0}, "accumulation: expected an integer, 1 or more, got 0"),
        ({"accumulation": True}, "accumulation: expected an integer, 1 or more, got True"),
        ({"checkpoint_every": 0, "checkpoint_dir": "x"}, "checkpoint_every: expected an integer, 1 or more, got 0"),
        ({"checkpoint_every": 1}, "checkpoint_every: expected a checkpoint_dir with it"),
        ({"keep_checkpoints": 0}, "keep_checkpoints: expected an integer, 1 or more, got 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm: expected a number above 0, got 0.0"),
        ({"mesh": Mesh(tp_size=2)}, "mesh: expected data-parallel ranks only, got tp 0/2"),
        ({"mesh": Mesh(dp_size=3), "num_lanes": 4}, "loader.num_lanes: expected a multiple of dp_size 3, got 4"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Setup(**options)


def test_the_loader_that_is_trained_on_is_not_evaluated() -> None:
    model, loader = TinyModel(), FakeLoader([], 1)
    with pytest.raises(ConfigError, match="eval_loader: expected a loader of its own, got the one that is trained on"):
        Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), max_steps=1, eval_loader=loader, eval_every=1)


def test_an_optimizer_is_needed() -> None:
    with pytest.raises(ConfigError, match="optimizer: expected one, or a precision manager, got neither"):
        Trainer(TinyModel(), FakeLoader([], 1), max_steps=1)


def test_batches_taken_ahead_change_nothing(tmp_path: Path) -> None:
    plain = Setup(max_steps=6)
    plain.trainer.train()
    ahead = Setup(max_steps=3, prefetch_depth=2, checkpoint_dir=tmp_path)
    ahead.trainer.train()
    resumed = Setup(max_steps=6, prefetch_depth=2, checkpoint_dir=tmp_path)
    resumed.trainer.train()
    losses = [[report.loss for report in setup.reports] for setup in (plain, ahead, resumed)]
    assert losses[1] + losses[2] == losses[0]


def test_several_callbacks_get_each_report() -> None:
    first: list[StepReport] = []
    second: list[StepReport] = []
    Setup(max_steps=2, on_step=[first.append, second.append]).trainer.train()
    assert first == second
    assert [report.step for report in first] == [1, 2]


def test_each_micro_batch_has_its_loss() -> None:
    setup = Setup([language_batch(0), without_targets(1)], num_lanes=2, max_steps=1)
    setup.trainer.train()
    (report,) = setup.reports
    assert report.losses[0] == report.loss
    assert math.isnan(report.losses[1])


@pytest.mark.timeout(90)
def test_sigterm_under_torchrun_saves_and_exits_with_0(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    script = ["-m", "tests.training.torchrun_script", str(tmp_path)]
    done = subprocess.run([*command, *script], capture_output=True, text=True, check=False, timeout=80, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert (first["step"], first["stopped_by"], first["checkpoint"]) == (4, "signal", "step_00000004")
    assert (first["dp_size"], first["group_left"]) == (2, False)
