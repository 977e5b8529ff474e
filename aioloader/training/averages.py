"""Step reports averaged over a window of steps, for logs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from aioloader.errors import ConfigError
from aioloader.training.reports import StepReport

__all__ = ["StepAverages", "StepScalars", "average_reports"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAverages:
    """What `num_steps` steps were like up to `step`.

    Attributes:
        step: The last of them.
        num_steps: How many.
        num_skipped: How many of them updated nothing.
        loss: Loss per target token over all of their tokens; NaN where there was none.
        lr: Learning rate of the last one.
        grad_norm: Mean over the steps that updated; NaN where none did, or where it is not known.
        tokens_per_s: Real tokens per second, all ranks together.
        targets_per_s: Effective tokens per second: those that the loss counts.
        padding_ratio: Share of padding.
        step_time_s: Mean.
        data_wait_s: Mean wait of this rank for its loader.
        data_wait_ratio: Share of the time that this is.
    """

    step: int
    num_steps: int
    num_skipped: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    targets_per_s: float
    padding_ratio: float
    step_time_s: float
    data_wait_s: float
    data_wait_ratio: float


def average_reports(reports: Sequence[StepReport]) -> StepAverages:
    """Return the averages of one report or more, each weighted by what it counts: losses by targets, rates by time."""
    time_s, wait_s = (sum(getattr(one, name) for one in reports) for name in ("step_time_s", "data_wait_s"))
    tokens, targets, padding = (sum(getattr(one, name) for one in reports) for name in ("num_tokens", "num_targets", "num_padding"))
    norms = [one.grad_norm for one in reports if not one.skipped and not math.isnan(one.grad_norm)]
    return StepAverages(
        step=reports[-1].step,
        num_steps=len(reports),
        num_skipped=sum(one.skipped for one in reports),
        loss=sum(one.loss * one.num_targets for one in reports if one.num_targets) / targets if targets else math.nan,
        lr=reports[-1].lr,
        grad_norm=sum(norms) / len(norms) if norms else math.nan,
        tokens_per_s=tokens / time_s,
        targets_per_s=targets / time_s,
        padding_ratio=padding / max(1, tokens + padding),
        step_time_s=time_s / len(reports),
        data_wait_s=wait_s / len(reports),
        data_wait_ratio=wait_s / time_s,
    )


class StepScalars:
    """Turns reports into named numbers to be logged, at every step whose number is a multiple of `every`, resumed or not.

    `train/...` are the `StepAverages` since the last time; `eval/...` and `ranks/...` come with the step that has them. NaN is left out.
    Only rank 0 has anything to log.

    Raises:
        ConfigError: `every` is below 1.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ConfigError("every", expected="1 or more", got=every, do="give the number of steps between two entries of the log")
        self._every = every
        self._reports: list[StepReport] = []
        self._first_step: int | None = None

    @property
    def first_step(self) -> int:
        """Return the first step of this run: what a log has of it and later steps is from an earlier run that was ahead."""
        assert self._first_step is not None
        return self._first_step

    def take(self, report: StepReport) -> dict[str, float]:
        """Take a report and return what is to be logged for its step, if anything."""
        if report.dp_rank:
            return {}
        if self._first_step is None:
            self._first_step = report.step
        self._reports.append(report)
        found: dict[str, float] = {}
        if report.step % self._every == 0:
            found = {f"train/{name}": value for name, value in asdict(average_reports(self._reports)).items() if name != "step"}
            self._reports.clear()
        if report.evaluation is not None:
            found |= {f"eval/{name}": value for name, value in asdict(report.evaluation).items()}
        if report.ranks is not None:
            works = [row.work_s for row in report.ranks.rows]
            found |= {"ranks/slowest_work_s": max(works), "ranks/median_work_s": report.ranks.median_work_s}
            found |= {"ranks/num_stragglers": len(report.ranks.stragglers), "ranks/token_imbalance": report.ranks.token_imbalance}
        return {name: value for name, value in found.items() if not math.isnan(value)}
