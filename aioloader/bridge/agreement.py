"""How ranks agree on the end of a pass: what each one says in a round, and what follows from the minimum over all of them. Pure.

    rank 0   steps 0 1 2 3 4 |         says: has 5, ended at 5            minimum over the ranks       after it every rank
    rank 1   steps 0 1 2 3 4 5 ..      says: has 6                 -->    (element by element)   -->   knows the same

One all-reduce of a few integers is a round. A rank may deliver a step once a round has shown that all ranks go there; rounds run
while the step before is trained on. What decides whether there is another round is the same on every rank: the step delivered
last and the results so far. So ranks that stop at the same step have begun the same number of rounds, and none is left waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from aioloader.errors import SynchronizationError, UnevenEndError

__all__ = ["Agreement", "Verdict"]

_NEVER: Final = 1 << 62
"""Above any step; a minimum ignores it."""


class Verdict(Enum):
    """What is known of a step: all ranks deliver it, the pass ends before it, or another round has to tell."""

    DELIVER = "deliver"
    END = "end"
    UNKNOWN = "unknown"


class Agreement:
    """One pass of one rank.

    Args:
        policy: "drop": all ranks stop where the first one ends. "pad": all go on until the last one ends. "error" and "repeat": all
            have to end at the same step.
        first_step: The step that the pass begins with, the same on every rank.
        pass_number: Tells rounds of different passes apart.
        rank: This rank of the whole job.
    """

    def __init__(self, policy: str, first_step: int, *, pass_number: int = 0, rank: int = 0) -> None:
        self._policy = policy
        self._pass_number = pass_number
        self._rank = rank
        self._horizon = first_step
        self._end: int | None = None
        self._largest = first_step
        self._can_fill = True
        self._has_failed = False
        self._known = first_step
        """All steps before this one are delivered by all ranks."""
        self._final: int | None = None
        self._error: Exception | None = None

    def report(self, horizon: int, end: int | None = None, *, largest: int | None = None, can_fill: bool = True) -> None:
        """Take note of what this rank has.

        Args:
            horizon: All steps before this one are there.
            end: Its data end before this step; None: not known yet.
            largest: The step before which the longest lane of this rank ends, if not `end`.
            can_fill: Whether it can make a filler for a step after its end.
        """
        self._horizon = max(self._horizon, horizon)  # a host that was replaced makes the same again
        if end is not None:
            self._end, self._can_fill = end, can_fill
        self._largest = max(self._largest, self._horizon, end or 0, largest or 0)

    def fail(self) -> None:
        """Take note that this rank fails and delivers nothing more."""
        self._has_failed = True

    @property
    def has_news(self) -> bool:
        """Return whether a round to which this rank contributes now brings all ranks closer to the end, if the others contribute so too."""
        return self._end is not None or self._horizon > self._known

    def contribution(self) -> list[int]:
        """Return what this rank says in a round; the round's result is the element-wise minimum over all ranks."""
        ended = self._end is not None
        return [
            self._pass_number,
            -self._pass_number,
            _NEVER if self._end is not None else self._horizon,
            _NEVER if self._end is None else self._end,
            -self._largest,
            int(ended),
            int(self._can_fill),
            self._rank if self._has_failed else _NEVER,
        ]

    def departure(self) -> list[int]:
        """Return what this rank says when it has left the pass for the next one: ranks that would go on need not wait for it."""
        return [self._pass_number, -self._pass_number - 1, *[_NEVER] * 6]

    def learn(self, minimum: Sequence[int]) -> None:
        """Take the result of a round. One that a rank began in a pass before, and left, says nothing: another one has to follow."""
        first_pass, last_pass, horizon, smallest_end, largest, all_ended, can_fill, failed = minimum
        if -last_pass > self._pass_number:
            self._error = _other_pass(self._pass_number, -last_pass)
        elif first_pass < self._pass_number:
            return
        elif failed != _NEVER:
            self._error = _failed(failed)
        elif self._policy == "pad":
            self._learn_padded(smallest_end, -largest, bool(all_ended), bool(can_fill))
        else:
            self._known = max(self._known, min(horizon, smallest_end))
            if smallest_end <= horizon:
                self._learn_end(smallest_end, -largest, bool(all_ended))

    def is_open(self, step: int) -> bool:
        """Return whether another round has to tell what becomes of a step."""
        return step >= self._known and self._final is None and self._error is None

    def verdict(self, step: int) -> Verdict:
        """Return what is known of a step; steps are asked for one after another.

        Raises:
            UnevenEndError: The lanes do not end at the same step, and are not to be padded.
            SynchronizationError: Another rank failed, or has left this pass.
        """
        if step < self._known:
            return Verdict.DELIVER
        if self._error is not None:
            raise self._error
        return Verdict.UNKNOWN if self._final is None else Verdict.END

    def _learn_padded(self, smallest_end: int, largest: int, all_ended: bool, can_fill: bool) -> None:
        if not can_fill and largest > smallest_end:
            self._error = _nothing_to_fill_with()
            return
        self._known = max(self._known, largest)
        if all_ended:
            self._final = self._known

    def _learn_end(self, smallest_end: int, largest: int, all_ended: bool) -> None:
        """Take note of the smallest end, which no rank can go below any more."""
        if self._policy == "drop" or (all_ended and largest == smallest_end):
            self._final = smallest_end
        elif largest > smallest_end:
            self._error = UnevenEndError(smallest_end, largest)


def _other_pass(own: int, last: int) -> SynchronizationError:
    return SynchronizationError(
        "end of data",
        f"expected all ranks to go on with pass {own} of this loader, got some that have begun pass {last}; "
        "begin and leave loops on all ranks alike",
    )


def _failed(rank: int) -> SynchronizationError:
    return SynchronizationError(
        "end of data", f"expected all ranks to go on, but the loader of rank {rank} failed; look for the error there", missing=[rank]
    )


def _nothing_to_fill_with() -> SynchronizationError:
    return SynchronizationError(
        "end of data",
        "expected each rank to have at least one micro-batch, which fillers are modelled on (end='pad'), got a rank without any; "
        "use fewer ranks, smaller micro-batches, or end='drop'",
    )
