"""What all ranks tell each other in a step: one sum of a few numbers."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from aioloader.training.groups.dp_group import DataParallelGroup
from aioloader.training.stragglers import RankTable, RankTimer

__all__ = ["StepCounts", "exchange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Numbers of one rank, and summed over all: what is decided by them is decided alike everywhere.

    Attributes:
        num_targets: Target tokens.
        loss: The sum of their losses.
        num_tokens: Real tokens.
        num_padding: Padding tokens.
        num_exhausted: Ranks without a batch.
        num_stopping: Ranks that were asked to stop.
        num_failed: Ranks whose loader or model failed.
        num_failed_saves: Ranks that know of a checkpoint that could not be written in the background.
    """

    num_targets: float
    loss: float
    num_tokens: float
    num_padding: float
    num_exhausted: float
    num_stopping: float
    num_failed: float
    num_failed_saves: float


def exchange(dp: DataParallelGroup, own: StepCounts, timer: RankTimer | None, operation: str) -> tuple[StepCounts, RankTable | None]:
    """Return the counts of all ranks, and their times where `timer` is given (on all ranks or on none).

    Raises:
        SynchronizationError: A rank is missing.
    """
    numbers = [float(number) for number in astuple(own)]
    summed = dp.reduce_numbers(numbers + (timer.pack() if timer is not None else []), operation)
    table = timer.unpack(summed[len(numbers) :]) if timer is not None else None
    names = StepCounts.__dataclass_fields__
    return StepCounts(**dict(zip(names, summed, strict=False))), table
