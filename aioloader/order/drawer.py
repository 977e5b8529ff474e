"""Which source the next record of a mixture comes from. Pure: whoever reads the records asks here where to read.

    RecordDrawer    sources = drawer.draw(n)             a block of positions at once; take_back(sources[k:]) undoes its tail
    TokenDrawer     source = drawer.next_source()        one by one, for the next depends on the length: note(source, num_tokens)

    a source has nothing left for position p: take back the draws from p on, ask exhausted(source), and draw again from p
        "repeat"       open it again (`passes[source]` tells for the how-manieth time); the draws from p on are the same
        "leave out"    it has had its passes; from p on the others share its weight, and targets are counted afresh from p
        "stop"         the epoch of the mixture ends before p

The state is a small dict by names. To stand at a position without it means to draw from the start, a microsecond or two each: earliest
deadlines have no closed form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import SupportsIndex, TypeVar

from aioloader.errors import ConfigError
from aioloader.order.adoption import adopt
from aioloader.order.apportion import WEIGHT
from aioloader.order.chairman import Chairman
from aioloader.order.mixture import Mixture
from aioloader.order.passes import Ending, Passes
from aioloader.protocols import Json

__all__ = ["RecordDrawer", "TokenDrawer"]

_T = TypeVar("_T")


class RecordDrawer:
    """Draws the sources of a mixture that weighs by records."""

    __slots__ = ("_chairman", "_changes", "_course", "_drawn_before", "_mixture", "_origin", "_passes")

    def __init__(self, mixture: Mixture, state: Json | None = None) -> None:
        """Start an epoch, or go on from a state.

        Raises:
            ResumeError: The state has other sources; `adopt` accepts them.
        """
        saved = adopt(state, mixture) if state is not None else {}
        since = saved.get("since", {})
        self._mixture = mixture
        self._passes = Passes(mixture, saved.get("passes", {}))
        self._changes: list[Json] = list(saved.get("changes", ()))
        self._origin: int = since.get("position", 0)
        self._drawn_before = _by_number(mixture, since.get("drawn", {}))
        drawn = _by_number(mixture, saved.get("drawn", {}))
        self._start([now - before for now, before in zip(drawn, self._drawn_before, strict=True)])

    @property
    def position(self) -> int:
        """Return the next position of this epoch of the mixture."""
        return self._chairman.position

    @property
    def drawn(self) -> tuple[int, ...]:
        """Return how often each source was drawn since the epoch began."""
        return tuple(before + since for before, since in zip(self._drawn_before, self._chairman.counts, strict=True))

    @property
    def passes(self) -> tuple[int, ...]:
        """Return how often each source was gone through to its end."""
        return tuple(self._passes.counts)

    def draw(self, num: int) -> list[int]:
        """Return the source numbers of the next `num` positions; fewer, or none, where no source has a weight any more."""
        return self._chairman.draw(num)

    def take_back(self, sources: Sequence[int]) -> None:
        """Undo the last draws, which gave `sources` since the start, the last restore or the last source left out."""
        self._chairman.take_back(sources)

    def exhausted(self, source: int) -> Ending:
        """Count that `source`, which is to give the record of `position`, has nothing left, and return what to do."""
        ending = self._passes.end(source, self._course, self.position)
        if ending == "leave out":
            self._origin, self._drawn_before = self.position, list(self.drawn)
            self._start([0] * len(self._drawn_before))
        return ending

    def state(self) -> Json:
        """Return the state as of `position`: JSON, of constant shape but for the recorded changes of sources."""
        return {
            "weigh": "records",
            "position": self.position,
            "drawn": _by_name(self._mixture, self.drawn),
            "passes": _by_name(self._mixture, self.passes),
            "since": {"position": self._origin, "drawn": _by_name(self._mixture, self._drawn_before)},
            "changes": list(self._changes),
        }

    def _start(self, counts: Sequence[int]) -> None:
        self._course = self._mixture.course(self._passes.left_out, self._origin)
        self._chairman = Chairman(self._course, self._origin, counts)


class TokenDrawer:
    """Draws the sources of a mixture that weighs by tokens: always the one that is furthest behind its share.

    All tokens of a record count by the weights at its first one (at its position, where that is the schedule's unit). Deficits,
    share less own tokens, are whole numbers of 2**-40 tokens that sum to zero.

    Attributes:
        position: The next position of this epoch of the mixture.
        num_tokens: Tokens consumed from all sources since the epoch began.
    """

    __slots__ = ("_changes", "_course", "_deficits", "_drawn", "_mixture", "_passes", "_since", "_tokens", "num_tokens", "position")

    def __init__(self, mixture: Mixture, state: Json | None = None) -> None:
        """Start an epoch, or go on from a state.

        Raises:
            ResumeError: The state has other sources; `adopt` accepts them.
        """
        saved = adopt(state, mixture) if state is not None else {}
        self.position: int = saved.get("position", 0)
        self.num_tokens: int = saved.get("num_tokens", 0)
        self._mixture = mixture
        self._passes = Passes(mixture, saved.get("passes", {}))
        self._changes: list[Json] = list(saved.get("changes", ()))
        self._drawn = _by_number(mixture, saved.get("drawn", {}))
        self._tokens = _by_number(mixture, saved.get("tokens", {}))
        self._deficits = _by_number(mixture, saved.get("deficits", {}))
        self._since: int = saved.get("since", 0)
        self._course = mixture.course(self._passes.left_out, self._since)

    @property
    def drawn(self) -> tuple[int, ...]:
        """Return how often each source was drawn since the epoch began."""
        return tuple(self._drawn)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return how many tokens of each source were consumed since the epoch began."""
        return tuple(self._tokens)

    @property
    def passes(self) -> tuple[int, ...]:
        """Return how often each source was gone through to its end."""
        return tuple(self._passes.counts)

    def next_source(self) -> int | None:
        """Return the source number of the next position, or None if no source has a weight any more. Changes nothing."""
        if self._place >= self._course.end:
            return None
        weights = self._course.weights(self._place)
        # The heavier, then the earlier source wins a tie.
        return max(
            (source for source, weight in enumerate(weights) if weight), key=lambda source: (self._deficits[source], weights[source])
        )

    def note(self, source: int, num_tokens: SupportsIndex) -> None:
        """Take in that the record of this position came from `source` and has so many tokens.

        Raises:
            ConfigError: The length is not a whole number of at least 0.
        """
        length = _whole_length(num_tokens)
        weights = self._course.weights(self._place)
        self._deficits = [deficit + weight * length for deficit, weight in zip(self._deficits, weights, strict=True)]
        self._deficits[source] -= WEIGHT * length
        self._drawn[source] += 1
        self._tokens[source] += length
        self.num_tokens += length
        self.position += 1

    def exhausted(self, source: int) -> Ending:
        """Count that `source`, which is to give the record of `position`, has nothing left, and return what to do."""
        ending = self._passes.end(source, self._course, self._place)
        if ending == "leave out":
            self._deficits, self._since = [0] * len(self._deficits), self._place
            self._course = self._mixture.course(self._passes.left_out, self._since)
        return ending

    def state(self) -> Json:
        """Return the state as of `position`: JSON, of constant shape but for the recorded changes of sources."""
        return {
            "weigh": "tokens",
            "position": self.position,
            "num_tokens": self.num_tokens,
            "drawn": _by_name(self._mixture, self._drawn),
            "tokens": _by_name(self._mixture, self._tokens),
            "deficits": _by_name(self._mixture, self._deficits),
            "passes": _by_name(self._mixture, self.passes),
            "since": self._since,
            "changes": list(self._changes),
        }

    @property
    def _place(self) -> int:
        return self._mixture.place(self.position, self.num_tokens)


def _whole_length(num_tokens: SupportsIndex) -> int:
    """Return a length as a plain int: a NumPy integer would overflow among the deficits, and is not JSON."""
    try:
        length = -1 if isinstance(num_tokens, bool) else index(num_tokens)
    except TypeError:
        length = -1
    if length < 0:
        raise ConfigError("Mixture(length=)", expected="an int >= 0 for every record", got=repr(num_tokens), do="return its token count")
    return length


def _by_name(mixture: Mixture, values: Sequence[_T]) -> dict[str, _T]:
    return dict(zip(mixture.names, values, strict=True))


def _by_number(mixture: Mixture, values: Mapping[str, int]) -> list[int]:
    return [values.get(name, 0) for name in mixture.names]
