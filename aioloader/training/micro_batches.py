"""What one rank does in a step before it meets the others: micro-batches forward and backward, and what is to be told about them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aioloader.training.gradients.synchronizer import GradientSynchronizer
from aioloader.training.loss import LossFunction, check_loss
from aioloader.training.reports import MicroBatch

__all__ = ["Accumulator", "StepWork"]


@dataclass(slots=True, kw_only=True)
class StepWork:
    """What this rank did in one step.

    Attributes:
        targets: Target tokens of each micro-batch.
        loss_sums: The sum of the losses of each micro-batch.
        num_tokens: Real tokens.
        num_padding: Padding tokens.
        exhausted: The loader had no more batch.
        error: What the loader or the model raised.
        data_wait_s: The wait for the loader.
        work_s: All of it.
        records: For each micro-batch, what its samples were made of.
        last_batch: The last one.
    """

    targets: list[float] = field(default_factory=list)
    loss_sums: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_padding: int = 0
    exhausted: bool = False
    error: Exception | None = None
    data_wait_s: float = 0.0
    work_s: float = 0.0
    records: list[tuple[Any, ...]] = field(default_factory=list)
    last_batch: MicroBatch | None = None

    @property
    def losses(self) -> tuple[float, ...]:
        """Return the loss per target of each micro-batch."""
        pairs = zip(self.loss_sums, self.targets, strict=True)
        return tuple(loss / targets if targets else math.nan for loss, targets in pairs)


class Accumulator:
    """Runs the micro-batches of a step; the gradients of their loss *sums* add up in `.grad`.

    Args:
        model: What is trained.
        loss_fn: (model, batch) -> (sum of the losses, number of targets).
        accumulation: Micro-batches in a step.
        synchronizer: Told which backward is the last of a step.
        backward: Called with each loss.
        device: Where the batches are.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        accumulation: int,
        synchronizer: GradientSynchronizer,
        backward: Callable[[Tensor], object],
        device: torch.device,
    ) -> None:
        self._model = model
        self._device = device
        self._loss_fn = loss_fn
        self._accumulation = accumulation
        self._synchronizer = synchronizer
        self._run_backward = backward

    def run(self, batches: Iterator[MicroBatch]) -> StepWork:
        """Return what was done. A failure is kept in it, for the other ranks must hear of it before it is raised."""
        started = time.perf_counter()
        work, sums = StepWork(), list[Tensor]()
        try:
            self._run(batches, work, sums)
            if sums:
                # One copy to the host for all micro-batches: with CUDA the step waits here, so that the time is that of the work.
                work.targets, work.loss_sums = torch.stack(sums).T.tolist()
        except Exception as error:  # noqa: BLE001 - raised by the run once all ranks know
            work.error = error
        work.work_s = time.perf_counter() - started
        return work

    def _run(self, batches: Iterator[MicroBatch], work: StepWork, sums: list[Tensor]) -> None:
        for index in range(self._accumulation):
            asked = time.perf_counter()
            batch = next(batches, None)
            work.data_wait_s += time.perf_counter() - asked
            if batch is None:
                work.exhausted = True
                return
            with self._synchronizer.no_sync() if index < self._accumulation - 1 else nullcontext():
                sums.append(self._backward(batch))
            work.num_tokens += batch.num_tokens
            work.num_padding += batch.num_padding
            work.records.append(tuple(getattr(sample, "record", sample) for sample in batch.samples))
            work.last_batch = batch

    def _backward(self, batch: MicroBatch) -> Tensor:
        """Return targets and loss sum, float64[2]."""
        if batch.is_filler:
            return torch.zeros(2, dtype=torch.float64, device=self._device)
        loss, num_targets = self._loss_fn(self._model, batch)
        check_loss(loss)
        if loss.requires_grad:
            self._run_backward(loss)
        found = torch.empty(2, dtype=torch.float64, device=self._device)
        found[0] = num_targets
        found[1] = loss.detach().squeeze()
        return found
