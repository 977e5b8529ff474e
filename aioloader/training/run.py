"""A training run: the loop around loader, model and optimizer, and the step in it.

    for each step:   accumulation x (next micro-batch, loss sum, backward)
                     all-reduce of targets, loss, tokens and flags       a rank without data: all stop here
                     gradients averaged over the ranks, scaled to "per target token", clipped
                     optimizer, scheduler, report, checkpoint

Everything that a rank decides here is decided from numbers that all ranks share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aioloader.errors import ConfigError, SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.training.checkpoint import load_checkpoint, save_checkpoint
from aioloader.training.checkpoint_files import complete_checkpoints, step_path
from aioloader.training.dp_group import DataParallelGroup
from aioloader.training.gradients import GradientSynchronizer
from aioloader.training.process_group import StopRequest
from aioloader.training.reports import MicroBatch, Scheduler, StepReport, TrainingLoader, TrainResult

__all__ = ["LossFunction", "RunOptions", "TrainingRun"]

LossFunction: TypeAlias = Callable[[nn.Module, Any], tuple[Tensor, Tensor | int]]
"""(model, batch) -> (sum of the losses of all target tokens, number of target tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `Trainer` was given, with defaults filled in; see there.

    Raises:
        ConfigError: An option is out of range.
    """

    model: nn.Module
    loader: TrainingLoader
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    scheduler: Scheduler | None
    loss_fn: LossFunction
    max_steps: int
    accumulation: int
    checkpoint_dir: Path | None
    checkpoint_every: int | None
    keep_checkpoints: int | None
    max_grad_norm: float | None
    on_step: Callable[[StepReport], object] | None
    resume: bool
    timeout_s: float

    def __post_init__(self) -> None:
        limits = {"max_steps": 0, "accumulation": 1, "checkpoint_every": 1, "keep_checkpoints": 1}
        for name, least in limits.items():
            _check_at_least(name, getattr(self, name), least)
        if self.checkpoint_every is not None and self.checkpoint_dir is None:
            raise ConfigError("checkpoint_every", expected="a checkpoint_dir with it", got="none", do="give checkpoint_dir")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError("max_grad_norm", expected="a number above 0", got=self.max_grad_norm, do="leave it out for no clipping")
        if self.mesh != Mesh(dp_rank=self.mesh.dp_rank, dp_size=self.mesh.dp_size):
            do = "write the loop yourself around GradientSynchronizer"
            raise ConfigError("mesh", expected="data-parallel ranks only", got=self.mesh.describe(), do=do)


@dataclass(slots=True, kw_only=True)
class _Window:
    """What this rank adds up over the micro-batches of one step: targets and loss, float64[2], and the rest as numbers."""

    sums: Tensor
    num_tokens: int = 0
    exhausted: bool = False
    data_wait_s: float = 0.0
    records: list[tuple[Any, ...]] = field(default_factory=list)
    last_batch: MicroBatch | None = None


class TrainingRun:
    """One call of `Trainer.train`: the options and what changes from step to step."""

    def __init__(self, options: RunOptions, device: torch.device, request: StopRequest) -> None:
        self._options = options
        self._device = device
        self._request = request
        self._dp = DataParallelGroup.resolve(options.mesh, None, options.timeout_s)
        self._synchronizer = GradientSynchronizer(options.model, options.mesh, timeout_s=options.timeout_s)
        self._step = 0
        self._first_step = 0
        self._num_skipped = 0
        self._last_loss: float | None = None
        self._last_batch: MicroBatch | None = None
        self._checkpoint: Path | None = None
        self._checkpoint_step = -1

    def run(self) -> TrainResult:
        """Restore, train to the end, save; `Trainer.train` says more."""
        self._synchronizer.broadcast_model()
        self._restore()
        self._options.optimizer.zero_grad(set_to_none=True)
        stopped_by = self._loop()
        self._save()
        return TrainResult(
            step=self._step,
            num_steps=self._step - self._first_step,
            num_skipped=self._num_skipped,
            last_loss=self._last_loss,
            stopped_by=stopped_by,
            checkpoint=self._checkpoint,
        )

    def _loop(self) -> Literal["max_steps", "data", "signal"]:
        options = self._options
        batches = iter(options.loader)
        while self._step < options.max_steps:
            started = time.perf_counter()
            window = self._accumulate(batches)
            targets, loss, tokens, exhausted, stopping = self._add_up(window)
            if exhausted:
                options.optimizer.zero_grad(set_to_none=True)
                return "data"
            lr = float(options.optimizer.param_groups[0]["lr"])
            grad_norm = self._update(targets)
            self._step += 1
            self._last_batch = window.last_batch
            if targets:
                self._last_loss = loss / targets
            report = StepReport(
                step=self._step,
                loss=loss / targets if targets else math.nan,
                grad_norm=grad_norm,
                lr=lr,
                num_tokens=int(tokens),
                num_targets=int(targets),
                skipped=not targets,
                step_time_s=time.perf_counter() - started,
                data_wait_s=window.data_wait_s,
                records=tuple(window.records),
            )
            if options.on_step is not None:
                options.on_step(report)
            if options.checkpoint_every is not None and self._step % options.checkpoint_every == 0:
                self._save()
            if stopping:
                return "signal"
        return "max_steps"

    def _accumulate(self, batches: Iterator[MicroBatch]) -> _Window:
        """Run the micro-batches of a step forward and backward; gradients of the loss *sums* add up in `.grad`."""
        window = _Window(sums=torch.zeros(2, dtype=torch.float64, device=self._device))
        last = self._options.accumulation - 1
        for index in range(self._options.accumulation):
            asked = time.perf_counter()
            batch = next(batches, None)
            window.data_wait_s += time.perf_counter() - asked
            if batch is None:
                window.exhausted = True
                break
            with self._synchronizer.no_sync() if index < last else nullcontext():
                self._backward(batch, window.sums)
            window.num_tokens += batch.num_tokens
            window.records.append(tuple(getattr(sample, "record", sample) for sample in batch.samples))
            window.last_batch = batch
        return window

    def _backward(self, batch: MicroBatch, sums: Tensor) -> None:
        if batch.is_filler:
            return
        loss, num_targets = self._options.loss_fn(self._options.model, batch.to(self._device))
        if loss.numel() != 1:
            raise ConfigError(
                "loss_fn", expected="the sum of the losses as one number", got=f"shape {list(loss.shape)}", do='use reduction="sum"'
            )
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        sums[0] += num_targets
        sums[1] += loss.detach().double().squeeze()

    def _add_up(self, window: _Window) -> list[float]:
        """Return targets, loss sum, tokens, and how many ranks are out of data or asked to stop, over all ranks."""
        flags = [window.num_tokens, int(window.exhausted), int(self._request.received)]
        numbers = torch.cat([window.sums, torch.tensor(flags, dtype=torch.float64, device=self._device)])
        return self._dp.reduce_numbers(numbers, f"counts of step {self._step + 1}")

    def _update(self, num_targets: float) -> float:
        """Average, scale, clip and apply the gradients, and return their norm before clipping."""
        options = self._options
        if not num_targets:
            self._num_skipped += 1
            options.optimizer.zero_grad(set_to_none=True)
            return 0.0
        self._synchronizer.sync_gradients(self._step + 1)
        for parameter in options.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self._dp.size / num_targets)
        grad_norm = self._synchronizer.clip_grad_norm(options.max_grad_norm)
        options.optimizer.step()
        if options.scheduler is not None:
            options.scheduler.step()
        options.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def _restore(self) -> None:
        """Take over the latest checkpoint, which must be the same for all ranks."""
        options = self._options
        if options.checkpoint_dir is None:
            return
        found = complete_checkpoints(options.checkpoint_dir)
        latest = found[-1][0] if found else -1
        high, low = self._dp.reduce_numbers([latest, -latest], "comparison of checkpoints", op=dist.ReduceOp.MAX)
        if high != -low:
            message = f"expected the same latest checkpoint on all ranks, got steps {-low:.0f} and {high:.0f}; share the directory"
            raise SynchronizationError("resume", message)
        if not found:
            return
        if not options.resume:
            raise ConfigError(
                "resume=False",
                expected="a checkpoint_dir without checkpoints",
                got=f"step {latest} in {options.checkpoint_dir}",
                do="give another directory, or empty this one",
            )
        path = step_path(options.checkpoint_dir, latest)
        parts = (options.model, options.optimizer, options.scheduler)
        loaded = load_checkpoint(path, *parts, mesh=options.mesh, timeout_s=options.timeout_s)
        options.loader.load_state_dict(loaded.loader_state)
        self._step = self._first_step = self._checkpoint_step = loaded.step
        self._num_skipped = loaded.progress["num_skipped"]
        self._checkpoint = loaded.path

    def _save(self) -> None:
        """Save the last complete step, unless that is done or there is none."""
        options = self._options
        if options.checkpoint_dir is None or self._last_batch is None or self._checkpoint_step == self._step:
            return
        self._checkpoint = save_checkpoint(
            options.checkpoint_dir,
            self._step,
            options.model,
            options.optimizer,
            options.scheduler,
            options.loader.state_dict(after=self._last_batch),
            progress={"num_skipped": self._num_skipped},
            keep=options.keep_checkpoints,
            mesh=options.mesh,
            timeout_s=options.timeout_s,
        )
        self._checkpoint_step = self._step


def _check_at_least(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(name, expected=f"an integer, {least} or more", got=repr(value), do="give a number of that size")
