"""Averages over steps weigh each number by what it counts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aioloader.errors import ConfigError
from aioloader.training import StepReport
from aioloader.training.averages import StepScalars, average_reports
from aioloader.training.reports import Evaluation
from aioloader.training.stragglers import RankTable, RankTimes


def report(step: int = 1, **facts: Any) -> StepReport:
    values: dict[str, Any] = {
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 0.1,
        "num_tokens": 80,
        "num_targets": 60,
        "num_padding": 20,
        "skipped": False,
        "step_time_s": 0.5,
        "data_wait_s": 0.1,
        "records": (),
    }
    return StepReport(step=step, **{**values, **facts})


def test_rates_of_a_step() -> None:
    one = report()
    assert (one.tokens_per_s, one.targets_per_s, one.padding_ratio) == (160.0, 120.0, 0.2)  # B058, B099
    assert report(num_tokens=0, num_padding=0).padding_ratio == 0.0


def test_losses_weigh_by_targets_and_rates_by_time() -> None:
    found = average_reports([report(loss=1.0, num_targets=10), report(2, loss=4.0, num_targets=30, step_time_s=1.5, lr=0.2, grad_norm=3.0)])
    assert (found.step, found.num_steps, found.num_skipped) == (2, 2, 0)
    assert found.loss == (10 + 120) / 40
    assert (found.tokens_per_s, found.targets_per_s) == (80.0, 20.0)
    assert (found.step_time_s, found.data_wait_s, found.data_wait_ratio) == (1.0, 0.1, 0.1)
    assert (found.lr, found.grad_norm, found.padding_ratio) == (0.2, 2.0, 0.2)


def test_steps_without_an_update_count_as_such() -> None:
    empty = report(loss=math.nan, num_targets=0, grad_norm=0.0, skipped=True)
    found = average_reports([empty, report(2)])
    assert (found.num_skipped, found.loss, found.grad_norm) == (1, 2.0, 1.0)
    alone = average_reports([empty])
    assert math.isnan(alone.loss)
    assert math.isnan(alone.grad_norm)


def test_scalars_come_at_multiples_also_after_a_resume() -> None:
    scalars = StepScalars(4)
    found = {step: scalars.take(report(step, loss=float(step))) for step in range(7, 13)}
    assert [step for step, values in found.items() if values] == [8, 12]
    assert scalars.first_step == 7
    assert found[8]["train/loss"] == 7.5
    assert found[8]["train/num_steps"] == 2
    assert found[12]["train/loss"] == 10.5


def test_evaluations_and_ranks_come_with_their_step() -> None:
    evaluation = Evaluation(loss=3.0, num_targets=10, num_tokens=20, num_batches=2)
    ranks = RankTable(num_steps=1, rows=tuple(RankTimes(dp_rank=rank, work_s=rank + 1.0, data_wait_s=0, num_tokens=1) for rank in range(2)))
    found = StepScalars(10).take(report(3, evaluation=evaluation, ranks=ranks))
    assert found["eval/loss"] == 3.0
    assert (found["ranks/slowest_work_s"], found["ranks/median_work_s"], found["ranks/num_stragglers"]) == (2.0, 1.0, 1)
    assert "train/loss" not in found


def test_nothing_is_logged_by_other_ranks_nor_without_a_number() -> None:
    assert StepScalars(1).take(report(dp_rank=1)) == {}
    assert "train/loss" not in StepScalars(1).take(report(loss=math.nan, num_targets=0))


def test_a_window_of_no_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="every: expected 1 or more, got 0"):
        StepScalars(0)
