"""A training run: the loop around loader, model and optimizer, and the step in it.

    for each step:   accumulation x (next micro-batch, loss sum, backward)
                     all-reduce of targets, loss, tokens and flags       a rank without data: all stop here
                     gradients averaged over the ranks, scaled to "per target token", clipped
                     optimizer, scheduler, evaluation, report, checkpoint

Everything that a rank decides here is decided from numbers that all ranks share.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from aioloader.errors import SynchronizationError
from aioloader.training.device_prefetch import DevicePrefetcher
from aioloader.training.evaluation import evaluate
from aioloader.training.gradients.synchronizer import GradientSynchronizer
from aioloader.training.groups.dp_group import DataParallelGroup
from aioloader.training.groups.process_group import StopRequest
from aioloader.training.micro_batches import Accumulator, StepWork
from aioloader.training.reports import Evaluation, MicroBatch, StepReport, TrainResult
from aioloader.training.run_checkpoints import RunCheckpoints
from aioloader.training.run_options import RunOptions
from aioloader.training.step_counts import StepCounts, exchange
from aioloader.training.stragglers import RankTable, RankTimer
from aioloader.training.update import FullPrecision, ManagedPrecision, StepOutcome, Update

__all__ = ["TrainingRun"]

_log = logging.getLogger("aioloader")

Ending: TypeAlias = Literal["max_steps", "data", "signal"]


class TrainingRun:
    """One call of `Trainer.train`: the options and what changes from step to step."""

    def __init__(self, options: RunOptions, device: torch.device, request: StopRequest) -> None:
        self._options = options
        self._device = device
        self._request = request
        self._dp = DataParallelGroup.resolve(options.mesh, None, options.timeout_s)
        self._synchronizer = self._make_synchronizer()
        self._update = self._make_update()
        self._accumulator = Accumulator(
            options.model, options.loss_fn, options.accumulation, self._synchronizer, self._update.backward, device
        )
        self._timer = RankTimer(self._dp.rank, self._dp.size)
        self._checkpoints = RunCheckpoints(options, self._dp)
        self._step = 0
        self._num_skipped = 0
        self._last_loss: float | None = None
        self._last_batch: MicroBatch | None = None

    def run(self) -> TrainResult:
        """Restore, train to the end, save; `Trainer.train` says more."""
        options = self._options
        self._synchronizer.broadcast_model()
        if options.precision is not None and self._dp.size > 1:
            options.precision.broadcast_masters()
        self._restore()
        first_step = self._step
        options.model.zero_grad(set_to_none=True)
        with self._checkpoints, closing(DevicePrefetcher(options.loader, self._device, depth=options.prefetch_depth)) as batches:
            stopped_by = self._loop(batches)
            self._save()
            self._checkpoints.finish()
        return TrainResult(
            step=self._step,
            num_steps=self._step - first_step,
            num_skipped=self._num_skipped,
            last_loss=self._last_loss,
            stopped_by=stopped_by,
            checkpoint=self._checkpoints.path,
        )

    def _make_synchronizer(self) -> GradientSynchronizer:
        options, precision = self._options, self._options.precision
        if precision is not None and precision.synchronizer is not None:
            given: GradientSynchronizer = precision.synchronizer
            return given
        synchronizer = GradientSynchronizer(
            options.model,
            options.mesh,
            comm_dtype=options.comm_dtype,
            accumulate_dtype=options.accumulate_dtype,
            timeout_s=options.timeout_s,
        )
        if precision is not None:
            precision.synchronizer = synchronizer
        return synchronizer

    def _make_update(self) -> Update:
        options = self._options
        if options.precision is not None:
            return ManagedPrecision(options.precision)
        assert options.optimizer is not None, "checked by RunOptions"
        return FullPrecision(options.optimizer, options.scheduler, self._synchronizer, options.max_grad_norm)

    def _restore(self) -> None:
        loaded = self._checkpoints.restore()
        if loaded is not None:
            self._options.loader.load_state_dict(loaded.loader_state)
            self._step = loaded.step
            self._num_skipped = loaded.progress["num_skipped"]

    def _loop(self, batches: Iterator[MicroBatch]) -> Ending:
        while self._step < self._options.max_steps:
            ending = self._take_step(batches)
            if ending is not None:
                return ending
        return "max_steps"

    def _take_step(self, batches: Iterator[MicroBatch]) -> Ending | None:
        started = time.perf_counter()
        work = self._accumulator.run(batches)
        counts, ranks = self._meet(work)
        if counts.num_exhausted:
            self._synchronizer.discard_gradients(self._step + 1)
            return "data"
        lr = self._update.lr
        outcome = self._apply(counts.num_targets)
        self._step += 1
        self._last_batch = work.last_batch
        if counts.num_targets:
            self._last_loss = counts.loss / counts.num_targets
        report = self._report(work, counts, outcome, lr, time.perf_counter() - started)
        self._after_step(replace(report, ranks=ranks, evaluation=self._evaluate()))
        return "signal" if counts.num_stopping else None

    def _meet(self, work: StepWork) -> tuple[StepCounts, RankTable | None]:
        """Exchange what this rank did with the other ranks.

        Raises:
            Exception: What failed on this rank.
            SynchronizationError: What failed on another rank, or a rank is missing.
        """
        step, every = self._step + 1, self._options.rank_table_every
        self._timer.add(work_s=work.work_s, data_wait_s=work.data_wait_s, num_tokens=work.num_tokens)
        timer = self._timer if every is not None and step % every == 0 else None
        try:
            counts, ranks = exchange(self._dp, self._count(work), timer, f"counts of step {step}")
        except SynchronizationError:
            if work.error is not None:  # it says more
                raise work.error from None
            raise
        if counts.num_failed:
            self._synchronizer.discard_gradients(step)
            with self._dp.together(f"step {step}"):
                if work.error is not None:
                    raise work.error
        if counts.num_failed_saves:
            self._checkpoints.finish()
        return counts, ranks

    def _count(self, work: StepWork) -> StepCounts:
        return StepCounts(
            num_targets=sum(work.targets),
            loss=sum(work.loss_sums),
            num_tokens=work.num_tokens,
            num_padding=work.num_padding,
            num_exhausted=work.exhausted,
            num_stopping=self._request.received,
            num_failed=work.error is not None,
            num_failed_saves=self._checkpoints.has_failed,
        )

    def _apply(self, num_targets: float) -> StepOutcome:
        """Average the gradients, scale them and update, unless there is nothing to learn from."""
        if num_targets:
            self._synchronizer.sync_gradients(self._step + 1)
            outcome = self._update.step(self._dp.size / num_targets)
        else:
            self._synchronizer.discard_gradients(self._step + 1)
            outcome = self._update.skip("no target")
        self._num_skipped += outcome.skipped
        return outcome

    def _report(self, work: StepWork, counts: StepCounts, outcome: StepOutcome, lr: float, step_time_s: float) -> StepReport:
        return StepReport(
            step=self._step,
            loss=counts.loss / counts.num_targets if counts.num_targets else math.nan,
            grad_norm=outcome.grad_norm,
            lr=lr,
            num_tokens=int(counts.num_tokens),
            num_targets=int(counts.num_targets),
            num_padding=int(counts.num_padding),
            skipped=outcome.skipped,
            step_time_s=step_time_s,
            work_s=work.work_s,
            data_wait_s=work.data_wait_s,
            records=tuple(work.records),
            losses=work.losses,
            dp_rank=self._dp.rank,
        )

    def _evaluate(self) -> Evaluation | None:
        """Evaluate if it is time for that; a signal in the middle leaves it out."""
        options = self._options
        if options.eval_loader is None or options.eval_every is None or self._step % options.eval_every:
            return None
        return evaluate(
            options.model,
            options.eval_loader,
            options.loss_fn,
            max_batches=options.eval_batches,
            device=self._device,
            mesh=options.mesh,
            timeout_s=options.timeout_s,
            should_stop=lambda: self._request.received,
        )

    def _after_step(self, report: StepReport) -> None:
        options = self._options
        if report.ranks is not None and self._dp.rank == 0:
            for sentence in report.ranks.warnings():
                _log.warning("step %d: %s", report.step, sentence)
        for call in options.on_step:
            call(report)
        if options.checkpoint_every is not None and self._step % options.checkpoint_every == 0:
            self._save()

    def _save(self) -> None:
        """Save the last complete step, if this run has done one."""
        if self._last_batch is not None:
            self._checkpoints.save(self._step, self._last_batch, {"num_skipped": self._num_skipped})
