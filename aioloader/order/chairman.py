"""Which source comes at which position: each record has a window of positions, and the window that closes first goes first.

    target of a source, weight 0.3     0.3  0.6  0.9  1.2  1.5  1.8 ...       margin 0.25
    window of its first record         [-----------]                          from target 0 + margin to target 1 - margin
    window of its second record                       [-----------            from target 1 + margin to target 2 - margin

If every record is drawn in its window, every count stays within one record, less the margin, of its target at every prefix. Tijdeman
proved that for n sources a margin of 1 / (2 (n - 1)) never fails, however the weights change with the position: windows come from
the targets, so weights to come are known to them. Windows depend on the counts only, so the counts are all the state there is.

A source that pauses (its weight is zero for a while) must not be drawn meanwhile, but its window may reach across the pause. Whether
that record comes before or after the pause is settled beforehand, so that all sources that pause are together as near to their targets
as can be, and the others cannot run ahead or fall behind as a group. Windows are a whole record wide in such a schedule. Counts stay
within one record where sources leave, or come and leave, one after another. This is not proven for sources that pause and return in
turns within a few records of each other: in random schedules of that kind a few in a hundred had a count up to two records away.

Source: R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980), 323-330.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import NamedTuple

from aioloader.order.apportion import NEVER, RECORD, Course, Line, Pause, apportion

__all__ = ["Chairman"]


class Chairman:
    """Draws the source of each position from `origin` on; a pure function of the course, the origin and the position.

    Attributes:
        position: The next position.
        counts: How often each source was drawn since the origin.
    """

    __slots__ = ("_changes", "_course", "_due", "_lines", "_margin", "_offsets", "_pauses", "_ready", "_waiting", "counts", "position")

    def __init__(self, course: Course, origin: int = 0, counts: Sequence[int] | None = None) -> None:
        """Start at the origin, or go on where each source was drawn `counts` times since."""
        self.counts = list(counts) if counts is not None else [0] * course.num_sources
        self.position = origin + sum(self.counts)
        self._course = course
        self._offsets = _targets_at(course, origin)
        self._pauses = _settle_pauses(course, origin, self._offsets)
        self._changes = sorted({position for pauses in self._pauses for pause in pauses for position in pause[:2]})
        self._lines = [Line(0, 0, 0, 0)] * course.num_sources
        self._margin = _margin(self._pauses, origin)
        self._open_windows()

    def draw(self, num: int) -> list[int]:
        """Return the sources of the next `num` positions; fewer where no source has a weight any more."""
        stop = min(self.position + num, self._course.end)
        sources: list[int] = []
        while self.position < stop:
            next_change = bisect_right(self._changes, self.position)
            change = self._changes[next_change] if next_change < len(self._changes) else NEVER
            sources += self._draw_between_changes(min(stop, change))
            if self.position == change:
                self._open_windows()
        return sources

    def take_back(self, sources: Sequence[int]) -> None:
        """Undo the last draws, which gave `sources`."""
        for source in sources:
            self.counts[source] -= 1
        assert min(self.counts) >= 0, "more draws taken back than made since the origin"
        self.position -= len(sources)
        self._open_windows()

    def _draw_between_changes(self, stop: int) -> list[int]:
        """Draw up to `stop`: of the open windows, the one that closes first; the earlier source wins a tie."""
        waiting, ready, due, counts, num_sources = self._waiting, self._ready, self._due, self.counts, len(self.counts)
        sources = []
        for position in range(self.position, stop):
            opened = (position + 1) * num_sources
            while waiting and waiting[0] < opened:
                source = heappop(waiting) % num_sources
                heappush(ready, due[source] * num_sources + source)
            source = heappop(ready) % num_sources if ready else self._take_next_to_open(position)
            sources.append(source)
            counts[source] += 1
            release, due[source] = self._window(source, position + 1)
            heappush(waiting, release * num_sources + source)
        self.position = max(self.position, stop)
        return sources

    def _take_next_to_open(self, position: int) -> int:
        """Return the source with a weight whose window opens next: a last resort among sources that pause in turns."""
        weights = self._course.weights(position)
        entry = min(entry for entry in self._waiting if weights[entry % len(weights)])
        self._waiting.remove(entry)
        heapify(self._waiting)
        return entry % len(weights)

    def _open_windows(self) -> None:
        """Queue every source afresh: those whose window is still closed by its start (`_waiting`), then by its end (`_ready`)."""
        num_sources = len(self.counts)
        windows = [self._window(source, self.position) for source in range(num_sources)]
        self._due = [due for _, due in windows]
        self._waiting = [release * num_sources + source for source, (release, _) in enumerate(windows)]
        self._ready: list[int] = []
        heapify(self._waiting)

    def _window(self, source: int, position: int) -> tuple[int, int]:
        """Return the first and the last position of the window of a source's next record, seen from `position`."""
        settled = self.counts[source] * RECORD + self._offsets[source]
        soonest, latest = settled + self._margin, settled + RECORD - self._margin
        low, high, start, slope = self._lines[source]
        if soonest <= low or latest > high:
            low, high, start, slope = self._lines[source] = self._course.line(source, latest)
        if low < soonest and latest <= high:
            release, due = start + (soonest - low - 1) // slope, start + (latest - low - 1) // slope
        else:
            release, due = self._course.reach(source, soonest) - 1, self._course.reach(source, latest) - 1
        for start, stop, num_before in self._pauses[source]:
            if start > max(due, position):  # a record that is late may meet a pause after its window
                break
            if stop > release:
                if position < start and self.counts[source] < num_before:
                    return release, start - 1
                release = stop
        return release, due


class _SettledPause(NamedTuple):
    """A pause, and how many records of the source come before it, counted from the origin."""

    start: int
    stop: int
    num_before: int


def _targets_at(course: Course, origin: int) -> tuple[int, ...]:
    """Return all targets at the origin, rounded so that they still sum to the positions passed."""
    if origin == course.start:
        return (0,) * course.num_sources
    exact = [course.target(source, origin) for source in range(course.num_sources)]
    return apportion(exact, (origin - course.start) * RECORD)


def _settle_pauses(course: Course, origin: int, offsets: Sequence[int]) -> list[list[_SettledPause]]:
    """Decide for every pause after the origin how many records of the source come before it: its target, rounded down or up.

    At each position where a source begins to pause, go through all that pause then, those that pause longest first, and round up as
    many of the new ones as bring the sum so far nearest to the sum of the targets; those that are owed most come first.
    """
    pauses = [[pause for pause in course.pauses(source) if pause.stop > origin] for source in range(course.num_sources)]
    settled: list[list[_SettledPause]] = [[] for _ in pauses]
    for position in sorted({max(pause.start, origin) for of_source in pauses for pause in of_source}):
        pausing = [(-pause.stop, source, pause) for source, of in enumerate(pauses) for pause in of if pause.start <= position < pause.stop]
        behind = 0
        for _, together in groupby(sorted(pausing), key=lambda entry: entry[0]):
            new: list[tuple[int, int, Pause]] = []
            for _, source, pause in together:
                target = int(course.target(source, position)) - offsets[source]
                if max(pause.start, origin) == position:
                    new.append((-(target % RECORD), source, pause))
                    settled[source].append(_SettledPause(pause.start, pause.stop, target // RECORD))
                behind += target - settled[source][-1].num_before * RECORD
            owed = [(source, pause) for owed, source, pause in sorted(new) if owed]
            for source, pause in owed[: max((behind + RECORD // 2) // RECORD, 0)]:
                settled[source][-1] = _SettledPause(pause.start, pause.stop, settled[source][-1].num_before + 1)
                behind -= RECORD
    return settled


def _margin(pauses: Sequence[Sequence[_SettledPause]], origin: int) -> int:
    """Return how far inside its record's target a window begins and ends; one unit less than proven, for whole numbers."""
    if any(pause.start > origin for of_source in pauses for pause in of_source):
        return 1
    num_drawn = sum(not (of_source and of_source[-1].stop == NEVER) for of_source in pauses)
    return RECORD // (2 * max(num_drawn, 2) - 2) - 1
