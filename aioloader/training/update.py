"""The update at the end of a step: what becomes of averaged gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from aioloader.training.checkpoints.snapshot import Stateful
from aioloader.training.gradients.synchronizer import GradientSynchronizer
from aioloader.training.reports import Scheduler

__all__ = ["FullPrecision", "ManagedPrecision", "ManagedStep", "PrecisionManager", "StepOutcome", "Update"]


class ManagedStep(Protocol):
    """What a precision manager says about a step."""

    @property
    def grad_norm(self) -> float | None:
        """Return the global norm of the gradients before clipping, where it is known."""

    @property
    def skipped(self) -> str | None:
        """Return why nothing was updated; None where it was."""


class PrecisionManager(Stateful, Protocol):
    """What `Trainer` uses of a `MixedPrecisionManager`: it owns optimizer and scheduler, and takes the gradients of `synchronizer`."""

    synchronizer: Any
    """A `GradientSynchronizer`; None: `Trainer` makes one and puts it here."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass."""

    def step(self, *, gradient_scale: float) -> ManagedStep:
        """Update with the averaged gradients times `gradient_scale`, and drop them."""

    def skip(self, reason: str) -> ManagedStep:
        """Leave out a step and drop the gradients."""

    def broadcast_masters(self) -> None:
        """Give all ranks the parameters of rank 0."""


class StepOutcome(NamedTuple):
    """How an update went: the norm of the gradients before clipping, and whether nothing was updated."""

    grad_norm: float
    skipped: bool


class Update(Protocol):
    """Turns gradients into new parameters."""

    @property
    def lr(self) -> float:
        """Return the learning rate of the first parameter group."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of one micro-batch."""

    def step(self, scale: float) -> StepOutcome:
        """Update with the synchronized gradients times `scale`, go on with the scheduler, and drop the gradients."""

    def skip(self, reason: str) -> StepOutcome:
        """Leave out a step and drop the gradients."""


class FullPrecision:
    """The parameters are what the optimizer works on.

    Args:
        optimizer: Over the parameters of the model.
        scheduler: Stepped after each update.
        synchronizer: Scales and clips the gradients.
        max_grad_norm: To which norm; None: not.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        synchronizer: GradientSynchronizer,
        max_grad_norm: float | None,
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._synchronizer = synchronizer
        self._max_grad_norm = max_grad_norm

    @property
    def lr(self) -> float:
        """See `Update.lr`."""
        return float(self._optimizer.param_groups[0]["lr"])

    def backward(self, loss: Tensor) -> None:
        """See `Update.backward`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, scale: float) -> StepOutcome:
        """See `Update.step`."""
        self._synchronizer.scale_gradients(scale)
        grad_norm = self._synchronizer.clip_grad_norm(self._max_grad_norm)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepOutcome(grad_norm, skipped=False)

    def skip(self, reason: str) -> StepOutcome:
        """See `Update.skip`."""
        self._optimizer.zero_grad(set_to_none=True)
        return StepOutcome(0.0, skipped=True)


class ManagedPrecision:
    """A precision manager does it all."""

    def __init__(self, manager: PrecisionManager) -> None:
        self._manager = manager

    @property
    def lr(self) -> float:
        """See `Update.lr`."""
        return float(self._manager.optimizer.param_groups[0]["lr"])

    def backward(self, loss: Tensor) -> None:
        """See `Update.backward`."""
        self._manager.backward(loss)

    def step(self, scale: float) -> StepOutcome:
        """See `Update.step`."""
        done = self._manager.step(gradient_scale=scale)
        return StepOutcome(math.nan if done.grad_norm is None else done.grad_norm, skipped=done.skipped is not None)

    def skip(self, reason: str) -> StepOutcome:
        """See `Update.skip`."""
        self._manager.skip(reason)
        return StepOutcome(0.0, skipped=True)
