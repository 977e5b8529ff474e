"""What a training run asks of a loader and a scheduler, and what it tells about a step and about itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from aioloader.protocols import Json
from aioloader.training.checkpoint import Stateful

__all__ = ["MicroBatch", "Scheduler", "StepReport", "TrainResult", "TrainingLoader"]


class MicroBatch(Protocol):
    """A dict of tensors that knows where it came from."""

    @property
    def samples(self) -> Sequence[Any]:
        """Return the provenance of each sample."""

    @property
    def num_tokens(self) -> int:
        """Return the number of real tokens."""

    @property
    def is_filler(self) -> bool:
        """Return whether the batch only keeps the ranks in step; it is not trained on."""

    def to(self, device: torch.device, /) -> Any:
        """Return the batch on `device`."""


class TrainingLoader(Protocol):
    """What `Trainer` uses of a loader. It also reads `num_lanes` where there is one."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the micro-batches of this rank."""

    def state_dict(self, *, after: Any) -> Json:
        """Return the state as of a delivered batch."""

    def load_state_dict(self, state: Json, /) -> None:
        """Go on from a state with the next iterator."""

    def close(self) -> None:
        """Release everything; safe to call twice."""


class Scheduler(Stateful, Protocol):
    """A learning-rate scheduler that goes by steps, as torch has them."""

    def step(self) -> None:
        """Go on by one optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step; the same on every rank but for the times and `records`.

    Attributes:
        step: Number of the step, from 1.
        loss: Loss per target token of the global batch before the update; NaN where there was no target.
        grad_norm: Global norm of the averaged gradients before clipping; 0 for a skipped step.
        lr: Learning rate of the first parameter group in this step.
        num_tokens: Real tokens in the global batch.
        num_targets: Target tokens in the global batch; the loss and the gradients are averages over them.
        skipped: Whether the update was left out, because there was no target.
        step_time_s: The whole step, the wait for data included.
        data_wait_s: Time that this rank waited for its loader.
        records: For each micro-batch of this rank, what its samples were made of.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    num_targets: int
    skipped: bool
    step_time_s: float
    data_wait_s: float
    records: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: Steps done in all, those before a resume included.
        num_steps: Steps done by this run.
        num_skipped: Steps without a target in all, those before a resume included.
        last_loss: Loss of the last step of this run that was not skipped; None if there was none.
        stopped_by: `"max_steps"`, `"data"` (a rank ran out of it) or `"signal"` (a rank got SIGTERM).
        checkpoint: The last checkpoint, saved or loaded.
    """

    step: int
    num_steps: int
    num_skipped: int
    last_loss: float | None
    stopped_by: Literal["max_steps", "data", "signal"]
    checkpoint: Path | None
