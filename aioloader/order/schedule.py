"""How the weights of a mixture change: in steps or in linear ramps, over positions or over consumed tokens.

Steps([(0, {"code": 0.1, "web": 0.9}), (10_000, {"code": 0.5, "web": 0.5})])      0.1 up to position 9,999, then 0.5
Ramp([(0, {"code": 0.1, "web": 0.9}), (10_000, {"code": 0.5, "web": 0.5})])       rises from 0.1 to 0.5, then stays
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from math import isfinite
from numbers import Real
from typing import Literal, TypeAlias

from aioloader.errors import ConfigError
from aioloader.order.apportion import NEVER, WEIGHT, Course, Piece, apportion

__all__ = ["Points", "Ramp", "Steps", "check_weights", "course", "require_names"]

Points: TypeAlias = Sequence[tuple[int, Mapping[str, float]]]
"""(position, weight of each source), positions rising."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Weights that hold from each point up to the next.

    Attributes:
        points: (position, weight of every source by name), positions rising. Before the first one the mixture's own weights hold.
            Weights need not sum to one.
        unit: Whether positions count records, or tokens consumed from all sources (only in mixtures that weigh by tokens).

    Raises:
        ConfigError: Positions do not rise, or weights are negative, not finite, all zero, or not of the same sources everywhere.
    """

    points: Points
    _: KW_ONLY
    unit: Literal["records", "tokens"] = "records"

    def __post_init__(self) -> None:
        """Check the points and keep them as plain tuples and dicts."""
        object.__setattr__(self, "points", _checked_points("Steps", self.points, self.unit))


@dataclass(frozen=True, slots=True)
class Ramp:
    """Weights that go on a straight line from each point to the next, and stay after the last.

    Attributes:
        points: As for `Steps`; the first line begins at position 0 with the mixture's own weights unless there is a point.
        unit: As for `Steps`.

    Raises:
        ConfigError: As for `Steps`.
    """

    points: Points
    _: KW_ONLY
    unit: Literal["records", "tokens"] = "records"

    def __post_init__(self) -> None:
        """Check the points and keep them as plain tuples and dicts."""
        object.__setattr__(self, "points", _checked_points("Ramp", self.points, self.unit))


def check_weights(where: str, weights: Mapping[str, object]) -> dict[str, float]:
    """Return the weights as floats.

    Raises:
        ConfigError: One is not a number of at least 0, all are zero, or one is too small beside the others to be counted.
    """
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, Real) or not isfinite(weight) or weight < 0:
            raise ConfigError(where, expected=f"a finite weight >= 0 for {name!r}", got=repr(weight), do="give its share, e.g. 0.3")
    checked = {name: float(weight) for name, weight in weights.items() if isinstance(weight, Real)}
    whole = sum(checked.values())
    if not 0 < whole < float("inf"):
        raise ConfigError(where, expected="a positive finite sum of weights", got=whole, do="give at least one source a weight")
    for name, weight in checked.items():
        if 0 < weight < whole / WEIGHT:
            raise ConfigError(where, expected=f"0 or at least 2**-40 of the sum for {name!r}", got=weight, do="use 0 or a larger weight")
    return checked


def course(points: Points, *, ramp: bool, left_out: Collection[str] = (), origin: int = 0) -> Course:
    """Return the weights along positions from the piece that holds `origin` on, with the weight of `left_out` shared by the others.

    The others share in proportion to their weights at each point. Where none of them has a weight the course ends; a ramp from or to
    such a point keeps the shares of its other end.
    """
    first = bisect_right(points, origin, key=lambda point: point[0]) - 1
    num_sources = len(points[0][1])
    shares = [_shares(weights, left_out) for _, weights in points[first:]]
    pieces: list[Piece] = []
    for (start, _), here, after in zip(points[first:], shares, [*shares[1:], None], strict=True):
        low = here or (after if ramp else None)
        if low is None:
            nobody = (0,) * num_sources
            return Course([*pieces, Piece(start, nobody, nobody)], end=start)
        pieces.append(Piece(start, low, (ramp and after) or low))
    return Course(pieces)


def _shares(weights: Mapping[str, float], left_out: Collection[str]) -> tuple[int, ...] | None:
    """Return the weights in whole units, or None if nobody is left to share them."""
    kept = [Fraction(0 if name in left_out else weight) for name, weight in weights.items()]
    return apportion(kept, WEIGHT) if any(kept) else None


def _checked_points(kind: str, points: object, unit: object) -> Points:
    where = f"{kind}(points)"
    if unit not in ("records", "tokens"):
        raise ConfigError(f"{kind}(unit=)", expected="'records' or 'tokens'", got=repr(unit), do="use one of these names")
    if not isinstance(points, Sequence) or not points:
        raise ConfigError(where, expected="a list of (position, weights)", got=repr(points), do="give at least one point")
    checked: list[tuple[int, dict[str, float]]] = []
    for point in points:
        position, weights = _checked_point(where, point)
        if checked and position <= checked[-1][0]:
            raise ConfigError(where, expected=f"a position above {checked[-1][0]}", got=position, do="give points in rising order")
        if checked:
            require_names(f"{kind} at {position}", weights, checked[0][1])
        checked.append((position, check_weights(f"{kind} at {position}", weights)))
    return tuple(checked)


def _checked_point(where: str, point: object) -> tuple[int, Mapping[str, object]]:
    match point:
        case (int() as position, Mapping() as weights) if not isinstance(position, bool) and 0 <= position < NEVER:
            return position, weights
    raise ConfigError(
        where, expected="(position >= 0, weights by name)", got=repr(point), do='use e.g. (10_000, {"code": 0.5, "web": 0.5})'
    )


def require_names(where: str, given: Collection[str], names: Collection[str]) -> None:
    """Refuse names other than `names`.

    Raises:
        ConfigError: A name is missing or unknown; the message lists each.
    """
    missing, unknown = [name for name in names if name not in given], [name for name in given if name not in names]
    if missing or unknown:
        facts = [f"{word} {', '.join(map(repr, found))}" for word, found in (("without", missing), ("with unknown", unknown)) if found]
        raise ConfigError(
            where, expected=f"weights of {', '.join(map(repr, names))}", got=" and ".join(facts), do="name each source, with 0 if it pauses"
        )
