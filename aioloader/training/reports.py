"""What a training run asks of a loader and a scheduler, and what it tells about a step and about itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from aioloader.protocols import Json
from aioloader.training.checkpoints.snapshot import Stateful
from aioloader.training.stragglers import RankTable

__all__ = ["Evaluation", "MicroBatch", "Scheduler", "StepReport", "TrainResult", "TrainingLoader"]


class MicroBatch(Protocol):
    """A dict of tensors that knows where it came from. On CUDA, `pin_memory()` and `to(device, non_blocking=True)` are used too."""

    @property
    def samples(self) -> Sequence[Any]:
        """Return the provenance of each sample."""

    @property
    def num_tokens(self) -> int:
        """Return the number of real tokens."""

    @property
    def num_padding(self) -> int:
        """Return the number of padding tokens."""

    @property
    def is_filler(self) -> bool:
        """Return whether the batch only keeps the ranks in step; it is not trained on."""

    def to(self, device: torch.device, /) -> Any:
        """Return the batch on `device`, of which the loader's `state_dict(after=)` knows what it knew of this one."""


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
class Evaluation:
    """The loss on data that is not trained on, the same on every rank.

    Attributes:
        loss: Loss per target token; NaN where there was no target.
        num_targets: Target tokens of all ranks.
        num_tokens: Real tokens of all ranks.
        num_batches: Micro-batches of all ranks, fillers left out.
    """

    loss: float
    num_targets: int
    num_tokens: int
    num_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step; the same on every rank but for `dp_rank`, the times and what says "of this rank".

    Attributes:
        step: Number of the step, from 1.
        loss: Loss per target token of the global batch before the update; NaN where there was no target.
        grad_norm: Global norm of the averaged gradients before clipping; 0 for a step without targets, NaN where a precision manager has no
            `ClipGradNorm` to measure it.
        lr: Learning rate of the first parameter group in this step.
        num_tokens: Real tokens in the global batch.
        num_targets: Target tokens in the global batch; the loss and the gradients are averages over them.
        num_padding: Padding tokens in the global batch.
        skipped: Whether the update was left out: there was no target, or the gradients were not finite and the precision manager said so.
        step_time_s: The whole step, the wait for data and for other ranks included, checkpoints and evaluations not.
        work_s: This rank's own part of it: the wait for data, forward and backward.
        data_wait_s: Time that this rank waited for its loader.
        records: For each micro-batch of this rank, what its samples were made of.
        losses: For each micro-batch of this rank, its loss per target token; NaN where it has none.
        dp_rank: This rank.
        ranks: Every so many steps, the times and tokens of all ranks; else None.
        evaluation: The result of the evaluation after this step, if there was one.
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
    num_padding: int = 0
    work_s: float = 0.0
    losses: tuple[float, ...] = ()
    dp_rank: int = 0
    ranks: RankTable | None = None
    evaluation: Evaluation | None = None

    @property
    def tokens_per_s(self) -> float:
        """Return the real tokens per second of all ranks together."""
        return self.num_tokens / self.step_time_s

    @property
    def targets_per_s(self) -> float:
        """Return the effective tokens per second of all ranks together: those that the loss counts."""
        return self.num_targets / self.step_time_s

    @property
    def padding_ratio(self) -> float:
        """Return the share of the global batch that is padding."""
        return self.num_padding / max(1, self.num_tokens + self.num_padding)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: Steps done in all, those before a resume included.
        num_steps: Steps done by this run.
        num_skipped: Steps without an update in all, those before a resume included.
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
