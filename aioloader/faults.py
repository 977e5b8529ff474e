"""What to do about a record that fails: raise, retry, quarantine. Decisions only: no clock, no I/O.

on_error="raise"                                              the default: everything before it is delivered, then the error is raised
on_error=Retry(3, backoff_s=0.5)                              run the record again, then raise
on_error=Quarantine(max_records=100)                          leave the record out, note it in the state and in a log
on_error={OSError: Retry(3, then=Quarantine()), ...}          by exception class; other classes are raised
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from aioloader.errors import ConfigError

__all__ = ["Decision", "FaultPolicy", "Quarantine", "Retry", "class_names"]


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Leave a failing record out, in later epochs and after every resume too, without running it again.

    Ranks that are checked (`check_every`) tell each other of such records when a pass begins, so that all of them leave these out.

    Attributes:
        max_records: More quarantined records than this (per rank) are an error; None: no limit.
        max_fraction: More than this share of the records read is an error, once 100 records were read.
        log: Path of a file that gets one JSON line per quarantined record: id, seq, lane, error, traceback.
    """

    max_records: int | None = None
    max_fraction: float | None = None
    log: str | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        if self.max_records is not None and (isinstance(self.max_records, bool) or self.max_records < 0):
            raise ConfigError("Quarantine(max_records=)", expected="a number of records, or None", got=self.max_records, do="use 0 or more")
        if self.max_fraction is not None and not 0 <= self.max_fraction <= 1:
            raise ConfigError(
                "Quarantine(max_fraction=)", expected="a share from 0 to 1, or None", got=self.max_fraction, do="use e.g. 0.01"
            )

    def is_exceeded(self, num_quarantined: int, num_records: int) -> bool:
        """Return whether so many quarantined records of so many read are too many."""
        if self.max_records is not None and num_quarantined > self.max_records:
            return True
        return self.max_fraction is not None and num_records >= _MIN_RECORDS and num_quarantined > self.max_fraction * num_records


@dataclass(frozen=True, slots=True)
class Retry:
    """Run a failing record again, up to `num_retries` times, after `backoff_s`, twice that, four times that, ... seconds.

    Attributes:
        num_retries: How many times, at least 1.
        backoff_s: Seconds before the first retry.
        then: What to do when the last retry failed: "raise" or a `Quarantine`.
    """

    num_retries: int
    backoff_s: float = 0.1
    then: Literal["raise"] | Quarantine = "raise"

    def __post_init__(self) -> None:
        """Check the options."""
        if type(self.num_retries) is not int or self.num_retries < 1:
            raise ConfigError("Retry(num_retries)", expected="at least 1", got=repr(self.num_retries), do="give a number of retries")
        if self.backoff_s < 0:
            raise ConfigError("Retry(backoff_s=)", expected="0 or more seconds", got=self.backoff_s, do="give a waiting time")
        if self.then != "raise" and not isinstance(self.then, Quarantine):
            raise ConfigError("Retry(then=)", expected="'raise' or a Quarantine", got=repr(self.then), do="choose one of them")


_MIN_RECORDS = 100  # below this a share says little


class Decision(NamedTuple):
    """What to do now: "raise", "retry" (after `delay_s`) or "quarantine" (under `quarantine`)."""

    kind: Literal["raise", "retry", "quarantine"]
    delay_s: float = 0.0
    quarantine: Quarantine | None = None


class FaultPolicy:
    """The policies of a loader, by exception class."""

    def __init__(self, on_error: Any) -> None:
        policies = on_error if isinstance(on_error, Mapping) else {BaseException: on_error}
        self._by_name: dict[str, Any] = {}
        for kind, policy in policies.items():
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise ConfigError(
                    "Loader(on_error=)", expected="exception classes as keys", got=repr(kind), do="use e.g. {OSError: Retry(3)}"
                )
            if policy != "raise" and not isinstance(policy, Retry | Quarantine):
                raise ConfigError(
                    "Loader(on_error=)",
                    expected="'raise', Retry(...), Quarantine(...), or a dict of them by exception class",
                    got=repr(policy),
                    do="choose one",
                )
            self._by_name[class_names(kind)[0]] = policy

    @property
    def can_skip(self) -> bool:
        """Return whether a record may be left out."""
        finals = (policy.then if isinstance(policy, Retry) else policy for policy in self._by_name.values())
        return any(isinstance(policy, Quarantine) for policy in finals)

    def decide(self, kinds: Sequence[str], num_failures: int) -> Decision:
        """Return what to do about a record whose error has the class names `kinds` (nearest first) and that failed so many times."""
        policy = next((self._by_name[kind] for kind in kinds if kind in self._by_name), "raise")
        if isinstance(policy, Retry):
            if num_failures <= policy.num_retries:
                return Decision("retry", policy.backoff_s * 2 ** (num_failures - 1))
            policy = policy.then
        return Decision("quarantine", quarantine=policy) if isinstance(policy, Quarantine) else Decision("raise")


def class_names(kind: type) -> tuple[str, ...]:
    """Return the names of an exception class and of the classes it inherits from, nearest first, as known in every process."""
    return tuple(f"{one.__module__}.{one.__qualname__}" for one in kind.__mro__ if issubclass(one, BaseException))
