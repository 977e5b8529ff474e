"""The arithmetic of mixtures: what every source is due at each position, in exact whole numbers.

    weights 0.3 / 0.7 -> 329853488333 / 769658139443 of 2**40        the same on every machine, no drift
    target of a source at p = sum of its weights at positions q < p    a line where weights stay, a parabola where they ramp

A record in the units of targets is twice the whole in the units of weights, because the sum over a ramp of L positions,
L first + (last - first) (L - 1) / 2, has halves. So targets are whole numbers at both ends of every piece, and what lies inside
a piece is compared as fractions over its length.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from math import isqrt
from typing import Final, NamedTuple

__all__ = ["NEVER", "RECORD", "WEIGHT", "Course", "Line", "Pause", "Piece", "apportion"]

WEIGHT: Final = 1 << 40
"""The weights of all sources at one position sum to this."""

RECORD: Final = 2 * WEIGHT
"""One record, in the units of targets."""

NEVER: Final = 1 << 63
"""A position that no run reaches."""


def apportion(weights: Sequence[int] | Sequence[Fraction], total: int) -> tuple[int, ...]:
    """Return whole numbers in proportion to `weights` that sum to `total`, each less than one away from its exact share.

    What rounding down leaves goes to the largest remainders, one each; the earlier source wins a tie. Zero stays zero.
    """
    whole = sum(weights)
    shares, remainders = zip(*(divmod(weight * total, whole) for weight in weights), strict=True)
    left = total - sum(shares)
    if not left:
        return shares
    favoured = set(sorted(range(len(weights)), key=lambda source: (-remainders[source], source))[:left])
    return tuple(share + (source in favoured) for source, share in enumerate(shares))


class Piece(NamedTuple):
    """Weights from position `start` to the start of the next piece: `first` at its start, on a line to `last` at its end."""

    start: int
    first: tuple[int, ...]
    last: tuple[int, ...]


class Line(NamedTuple):
    """A stretch on which a weight stays: a target above `low`, up to `high`, is reached before start + ceil((target - low) / slope)."""

    low: int
    high: int
    start: int
    slope: int


class Pause(NamedTuple):
    """A longest run of positions, `start` to `stop` - 1, at which a source has weight zero."""

    start: int
    stop: int


class Course:
    """The weights and targets of every source along the positions from `start` on.

    Attributes:
        start: The first position; targets are counted from here.
        end: The first position at which nobody has a weight, or `NEVER`.
        num_sources: Number of sources.
    """

    __slots__ = ("_lengths", "_pieces", "_starts", "_targets", "end", "num_sources", "start")

    def __init__(self, pieces: Sequence[Piece], end: int = NEVER) -> None:
        """Take pieces that follow each other; the weights of the last one stay (`first == last`)."""
        self.start, self.end = pieces[0].start, end
        self.num_sources = len(pieces[0].first)
        self._pieces = tuple(pieces)
        self._starts = [piece.start for piece in pieces]
        self._lengths = [stop - start for start, stop in zip(self._starts, [*self._starts[1:], NEVER], strict=True)]
        self._targets = [self._targets_at_starts(source) for source in range(self.num_sources)]

    def weights(self, position: int) -> tuple[int, ...]:
        """Return the weights at a position, in units of which `WEIGHT` make one; rounded inside a ramp."""
        index = bisect_right(self._starts, position) - 1
        start, first, last = self._pieces[index]
        if first is last:
            return first
        done, length = position - start, self._lengths[index]
        return apportion([low * (length - done) + high * done for low, high in zip(first, last, strict=True)], WEIGHT)

    def target(self, source: int, position: int) -> Fraction:
        """Return how much of a source is due before `position`, exactly, in units of which `RECORD` make one record."""
        index = bisect_right(self._starts, position) - 1
        start, first, last = self._pieces[index]
        steps = position - start
        bend = Fraction((last[source] - first[source]) * steps * (steps - 1), self._lengths[index])
        return self._targets[source][index] + 2 * steps * first[source] + bend

    def reach(self, source: int, amount: int) -> int:
        """Return the smallest position before which at least `amount` > 0 of a source is due, or `NEVER`."""
        targets = self._targets[source]
        index = bisect_left(targets, amount) - 1
        start, first, last = self._pieces[index]
        weight, missing = first[source], amount - targets[index]
        if weight != last[source]:
            return start + _steps_on_ramp(missing, weight, last[source] - weight, self._lengths[index])
        return start - missing // (-2 * weight) if weight else NEVER

    def line(self, source: int, amount: int) -> Line:
        """Return the stretch on which `amount` > 0 of a source is reached; an empty one if that is on a ramp or never."""
        targets = self._targets[source]
        index = bisect_left(targets, amount) - 1
        start, first, last = self._pieces[index]
        slope = 2 * first[source] if first[source] == last[source] else 0
        return Line(targets[index], targets[index] + slope * self._lengths[index], start, slope)

    def pauses(self, source: int) -> list[Pause]:
        """Return where a source has weight zero, in order."""
        pauses: list[Pause] = []
        for (start, first, last), length in zip(self._pieces, self._lengths, strict=True):
            if first[source]:
                continue
            # A ramp that rises from zero is zero at its first position only.
            stop = start + 1 if last[source] else start + length
            if pauses and pauses[-1].stop == start:
                pauses[-1] = Pause(pauses[-1].start, stop)
            else:
                pauses.append(Pause(start, stop))
        return pauses

    def is_over(self, source: int, position: int) -> bool:
        """Return whether a source has weight zero at `position` and ever after."""
        pauses = self.pauses(source)
        return bool(pauses) and pauses[-1].start <= position and pauses[-1].stop == NEVER

    def _targets_at_starts(self, source: int) -> list[int]:
        """Return the targets of a source at the starts of all pieces."""
        targets = [0]
        for (_, first, last), length in zip(self._pieces[:-1], self._lengths, strict=False):
            targets.append(targets[-1] + 2 * length * first[source] + (last[source] - first[source]) * (length - 1))
        return targets


def _steps_on_ramp(missing: int, first: int, rise: int, length: int) -> int:
    """Return the smallest m with 2 m first + rise m (m - 1) / length >= missing, for a ramp known to get that far."""
    linear, scaled = 2 * length * first - rise, length * missing
    root = (isqrt(linear * linear + 4 * rise * scaled) - linear) // (2 * rise)
    steps = max(root - 1, 0)  # the whole square root is less than one too small, and the root less than two
    while (rise * steps + linear) * steps < scaled:
        steps += 1
    return steps
