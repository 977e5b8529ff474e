"""How a step ends on all ranks alike: what is left is sent, each rank says how it fared, and all come to the same conclusion.

all well on every rank         averages in `.grad`
a rank discarded or failed     gradients dropped on every rank; a rank that expected averages gets an error that names the others
a rank is missing              an error that names it and the first bucket that has not arrived; the synchronizer can do no more
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from aioloader.errors import SynchronizationError
from aioloader.training.gradients.overlap import Outbox
from aioloader.training.groups.dp_group import DataParallelGroup

__all__ = ["Ballot", "Verdict", "end_step", "end_step_alone"]


class Verdict(IntEnum):
    """What a rank says of its step."""

    GOOD = 0
    DISCARDED = 1
    FAILED = 2


class Ballot(NamedTuple):
    """What a rank says at the end of a step; the element-wise maximum over the ranks is what all of them know then.

    Attributes:
        used: By parameter: there is a gradient.
        late: By bucket: gradients came after it was sent.
        verdicts: By rank; each rank fills in its own.
    """

    used: list[bool]
    late: list[bool]
    verdicts: list[int]

    def numbers(self) -> list[int]:
        """Return it as what is sent."""
        return [*map(int, self.used), *map(int, self.late), *self.verdicts]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int], num_parameters: int, num_buckets: int) -> Ballot:
        """Return what was sent as `numbers`."""
        used, late = numbers[:num_parameters], numbers[num_parameters : num_parameters + num_buckets]
        return cls([*map(bool, used)], [*map(bool, late)], [*numbers[num_parameters + num_buckets :]])

    def ranks_that(self, verdict: Verdict) -> list[int]:
        """Return the ranks that said so."""
        return [rank for rank, said in enumerate(self.verdicts) if said == verdict]


def end_step(outbox: Outbox, group: DataParallelGroup, operation: str, verdict: Verdict) -> int:
    """Leave the averages in `.grad` and return how many buckets were sent twice. Every rank has to come here once for each step.

    Raises:
        SynchronizationError: A rank is missing, or failed or discarded its gradients where this one did not.
        ConfigError: The problem of this rank.
    """
    _check_complete(outbox, group, operation)
    deadline_s = time.monotonic() + group.timeout_s
    verdicts = [0] * group.size
    verdicts[group.rank] = verdict if outbox.problem is None or verdict else Verdict.FAILED
    used = outbox.used()
    try:
        outbox.send_rest()
        own = Ballot(used, outbox.late(), verdicts)
        numbers = torch.tensor(own.numbers(), dtype=torch.int32, device=group.control_device)
        counting = group.start(numbers, f"{operation}, usage map", op=dist.ReduceOp.MAX)
        outbox.wait(deadline_s, operation)
        counting.wait(deadline_s - time.monotonic())
        ballot = Ballot.from_numbers(numbers.tolist(), len(used), len(outbox.buckets))
        late = [number for number, is_late in enumerate(ballot.late) if is_late]
        outbox.send_late(late, deadline_s, operation)
    except SynchronizationError as error:
        outbox.cut(error.missing)
        raise
    if any(ballot.verdicts):
        _drop(outbox, verdict)
        if verdict is Verdict.GOOD:
            raise _others_failed(ballot, group, operation)
    else:
        outbox.hand_out(ballot.used)
        outbox.begin_anew()
    return len(late)


def end_step_alone(outbox: Outbox, verdict: Verdict) -> None:
    """Do the same without other ranks: nothing is sent.

    Raises:
        ConfigError: The problem of this rank.
    """
    if verdict or outbox.problem is not None:
        _drop(outbox, verdict)
    else:
        outbox.hand_out(outbox.used())
        outbox.begin_anew()


def _check_complete(outbox: Outbox, group: DataParallelGroup, operation: str) -> None:
    """Refuse to wait again for ranks that have gone missing: collectives would not match any more."""
    if outbox.lost is not None:
        outbox.drop()
        who = ", ".join(map(str, outbox.lost)) or "of unknown number"
        message = (
            f"on dp_rank {group.rank}: expected all {group.size} data-parallel ranks since the last step, got dp_rank {who} missing in an "
            "earlier round; start all ranks again from the last checkpoint"
        )
        raise SynchronizationError(operation, message, missing=outbox.lost)


def _drop(outbox: Outbox, verdict: Verdict) -> None:
    """Drop the gradients; raise what is wrong with them here, unless this rank has discarded them anyway."""
    problem = outbox.problem
    outbox.drop()
    if problem is not None and verdict is Verdict.GOOD:
        raise problem


def _others_failed(ballot: Ballot, group: DataParallelGroup, operation: str) -> SynchronizationError:
    failed, discarded = ballot.ranks_that(Verdict.FAILED), ballot.ranks_that(Verdict.DISCARDED)
    parts = [f"an error in the gradients of dp_rank {', '.join(map(str, failed))}"] if failed else []
    parts += [f"dp_rank {', '.join(map(str, discarded))} discarding its step"] if discarded else []
    message = (
        f"on dp_rank {group.rank}: expected the gradients of all {group.size} ranks, got {' and '.join(parts)}; "
        "look in the logs there; this step has no gradients on any rank, the next one may go on"
    )
    return SynchronizationError(operation, message, missing=sorted((*failed, *discarded)))
