"""How often each source of a mixture was gone through, and what happens where one ends.

1. all_exhausted, and every source that still has a weight was gone through            stop
2. a source with a limit (`repeats`) that has passes left                              repeat
3. a source with a limit that has none left: if others have a weight now               leave out
                                             if not                                    stop
4. any other source: first_exhausted                                                   stop
                     all_exhausted, repeat                                             repeat
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from aioloader.order.apportion import Course
from aioloader.order.mixture import Mixture

__all__ = ["Ending", "Passes"]

Ending: TypeAlias = Literal["stop", "repeat", "leave out"]
"""What to do about a source that has nothing left."""


class Passes:
    """Counts the passes over each source.

    Attributes:
        counts: How often each source was gone through to its end.
    """

    __slots__ = ("_limits", "_mixture", "counts")

    def __init__(self, mixture: Mixture, saved: Mapping[str, int]) -> None:
        self.counts = [saved.get(name, 0) for name in mixture.names]
        self._mixture = mixture
        self._limits = [(mixture.repeats or {}).get(name) for name in mixture.names]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the names of the sources that have had all their passes."""
        rows = zip(self._mixture.names, self.counts, self._limits, strict=True)
        return tuple(name for name, count, limit in rows if limit is not None and count >= limit)

    def end(self, source: int, course: Course, place: int) -> Ending:
        """Count a pass over `source`, which ended at `place` on `course`, and return what to do."""
        self.counts[source] += 1
        limit, stop = self._limits[source], self._mixture.stop
        if stop == "all_exhausted" and all(count or course.is_over(other, place) for other, count in enumerate(self.counts)):
            return "stop"
        if limit is None:
            return "stop" if stop == "first_exhausted" else "repeat"
        if self.counts[source] < limit:
            return "repeat"
        return "leave out" if self._mixture.course(self.left_out, place).end > place else "stop"
