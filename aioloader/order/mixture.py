"""A mixture of sources: which sources, in which shares, and what happens where one ends.

Mixture({"code": (code, 0.3), "web": (web, 0.7)})
positions   0 1 2 3 4 5 6 7 8 9 ...
sources     w c w w c w w w c w ...      counts stay within one record of the target at every prefix
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from aioloader.errors import ConfigError
from aioloader.order.apportion import Course
from aioloader.order.schedule import Points, Ramp, Steps, check_weights, course, require_names
from aioloader.protocols import Json, Record

__all__ = ["Mixture"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Draws records from several sources in given shares; the source of each position is the same on every topology.

    With `weigh="records"` the number of records drawn from every source is less than one away from the sum of its weights at every
    prefix, also with weights that change (`aioloader.order.chairman` tells about sources that pause and return in turns). With
    `weigh="tokens"` the next record comes from the source that is furthest behind its share of the tokens consumed; a source is
    then ahead by less than the longest record, and behind by at most the longest record times 1 + 1/2 + ... + 1/(n - 1) for n
    sources. A source is never drawn while its weight is zero.

    Attributes:
        sources: (source, weight) by name, in an order that is part of the configuration. Weights need not sum to one.
        schedule: Weights that change, as `Steps` or `Ramp`; until its first point the weights of `sources` hold.
        weigh: Whether weights are shares of records or of tokens.
        length: For `weigh="tokens"`: the number of tokens of a record.
        stop: `"first_exhausted"` ends the epoch where a source that is drawn has nothing left; `"all_exhausted"` repeats sources until
            each that still has a weight was gone through once; `"repeat"` repeats them for ever.
        repeats: How many times a source may be gone through, by name. After that its weight is zero and the others share it by their
            weights; such a source does not end the epoch, unless it is the last.

    Raises:
        ConfigError: An option is missing, unknown or out of range, or names and weights do not fit.
    """

    sources: Mapping[str, tuple[Any, float]]
    _: KW_ONLY
    schedule: Steps | Ramp | None = None
    weigh: Literal["records", "tokens"] = "records"
    length: Callable[[Record], int] | None = None
    stop: Literal["first_exhausted", "all_exhausted", "repeat"] = "first_exhausted"
    repeats: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        _check_sources(self.sources)
        check_weights("Mixture(sources)", self._own_weights)
        _check_choice("weigh", self.weigh, ("records", "tokens"))
        _check_choice("stop", self.stop, ("first_exhausted", "all_exhausted", "repeat"))
        self._check_length()
        if self.schedule is not None:
            self._check_schedule(self.schedule)
        self._check_repeats()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the sources; a source's number is its place here."""
        return tuple(self.sources)

    @property
    def points(self) -> Points:
        """Return (position, weight of each source by name), the first at position 0."""
        scheduled = self.schedule.points if self.schedule is not None else ()
        own = () if scheduled and scheduled[0][0] == 0 else ((0, self._own_weights),)
        return tuple((position, {name: float(weights[name]) for name in self.sources}) for position, weights in (*own, *scheduled))

    def place(self, position: int, num_tokens: int) -> int:
        """Return where on the course the record at `position` stands, after `num_tokens` of all sources were consumed."""
        return num_tokens if self.schedule is not None and self.schedule.unit == "tokens" else position

    def course(self, left_out: Collection[str] = (), origin: int = 0) -> Course:
        """Return the weights along the places from `origin` on, with the weight of `left_out` shared by the others."""
        return course(self.points, ramp=isinstance(self.schedule, Ramp), left_out=left_out, origin=origin)

    def fingerprint(self) -> dict[str, Json]:
        """Return the options that decide the order, and the fingerprints of the sources that have one."""
        sources = [(name, getattr(source, "fingerprint", None)) for name, (source, _) in self.sources.items()]
        return {
            "kind": "Mixture",
            "sources": [[name, dict(fingerprint()) if callable(fingerprint) else None] for name, fingerprint in sources],
            "schedule": type(self.schedule).__name__ if self.schedule is not None else None,
            "unit": self.schedule.unit if self.schedule is not None else "records",
            "points": [[position, dict(weights)] for position, weights in self.points],
            "weigh": self.weigh,
            "stop": self.stop,
            "repeats": dict(self.repeats or {}),
        }

    @property
    def _own_weights(self) -> dict[str, float]:
        return {name: weight for name, (_, weight) in self.sources.items()}

    def _check_length(self) -> None:
        if self.weigh == "tokens" and not callable(self.length):
            do = 'give e.g. length=lambda record: len(record["input_ids"])'
            raise ConfigError("Mixture(length=)", expected="a function from a record to its tokens", got=repr(self.length), do=do)
        if self.weigh == "records" and self.length is not None:
            raise ConfigError("Mixture(length=)", expected="None with weigh='records'", got=repr(self.length), do="use weigh='tokens'")

    def _check_schedule(self, schedule: object) -> None:
        if not isinstance(schedule, Steps | Ramp):
            raise ConfigError(
                "Mixture(schedule=)", expected="Steps, Ramp or None", got=repr(schedule), do="use e.g. Steps([(0, {...}), ...])"
            )
        require_names("Mixture(schedule=)", schedule.points[0][1], self.sources)
        if schedule.unit == "tokens" and self.weigh != "tokens":
            raise ConfigError(
                "Mixture(schedule=)", expected="unit='records' with weigh='records'", got="unit='tokens'", do="use weigh='tokens'"
            )

    def _check_repeats(self) -> None:
        for name, times in (self.repeats or {}).items():
            if name not in self.sources:
                listed = ", ".join(map(repr, self.sources))
                raise ConfigError("Mixture(repeats=)", expected=f"names among {listed}", got=repr(name), do="name a source")
            if type(times) is not int or times < 1:
                raise ConfigError(f"Mixture(repeats=) of {name!r}", expected="an int >= 1", got=repr(times), do="give a number of passes")


def _check_choice(option: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ConfigError(f"Mixture({option}=)", expected=f"one of {listed}", got=repr(value), do="use one of these names")


def _check_sources(sources: object) -> None:
    expected = "a dict from a name to (source, weight)"
    do = 'use e.g. {"code": (source, 0.3), "web": (source, 0.7)}'
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError("Mixture(sources)", expected=expected, got=repr(sources), do=do)
    for name, entry in sources.items():
        if not (isinstance(name, str) and name and isinstance(entry, tuple) and len(entry) == 2):
            raise ConfigError("Mixture(sources)", expected=expected, got=f"{name!r}: {entry!r}", do=do)
