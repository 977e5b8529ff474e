"""Which documents share a row: packing on plain lengths, for online batching and for offline preprocessing alike.

    held       700 300 1200 90 650 860 ...      documents that have no row yet, oldest first
    close      700 + 1200 + 90                  a row of 2048: the oldest, and those that fill the rest best

A row's documents are chosen only as it closes, from all that are held. That is what makes rows full: best fit with the usual
bins, where a document has its place for good, stays at 98 to 99.5 % of rows of 2,048 tokens (lognormal lengths, mean 800), with
1,000 bins as with 30, because the gaps left are smaller than almost any document. Among 64 documents some pair fits a gap to
within a few tokens. And the state is small: the documents held, in their order, and nothing about bins.

Source: first fit and best fit are the classical bin packing heuristics (Johnson, 1974); packing documents by best fit so that
none is cut is Ding et al., "Fewer Truncations Improve Language Modeling" (2024). Choosing a row's documents as it closes,
and its last ones as a pair, is ours.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Final, Literal

__all__ = ["FitStrategy", "OpenRows", "pack_lengths"]

FitStrategy = Literal["first_fit", "best_fit"]

_LOOK_AHEAD: Final = 64
"""Documents held by default: fewer do not reach 99.5 % for the lengths that are hardest, and the state grows with each."""
_MIN_OPEN: Final = 2
"""Rows' worth of tokens held by default at least, so that short documents leave a choice when a row has taken its share."""
_REACH: Final = 3
"""A pair can fill a gap of about twice the mean length; above this many, the row takes the oldest document and leaves the choice."""
_MAX_STEPS: Final = 64
"""Pairs looked at per gap: those of the default look-ahead, and no more where more documents are held."""


class OpenRows:
    """Documents that wait for a row, known by tickets that rise in the order in which they came.

    Adding a document costs O(log held). Closing a row costs at most 64 steps for each document or pair that it takes, except
    that `first_fit` goes through all that are held.

    Args:
        seq_len: Tokens per row.
        strategy: How a row is filled; the oldest document is always in it.
        open_bins: A row closes when documents worth so many rows are held; None: when 64 documents are, worth two rows or more.
        max_age: A row closes at the latest when so many documents came after the oldest held; None for no limit.

    Attributes:
        num_tokens: Tokens of the documents held.
    """

    __slots__ = ("_held", "_lengths", "_max_age", "_max_tokens", "_next", "_seq_len", "_strategy", "_tickets", "num_tokens")

    def __init__(self, seq_len: int, *, strategy: FitStrategy, open_bins: int | None = None, max_age: int | None = None) -> None:
        self.num_tokens = 0
        self._seq_len = seq_len
        self._strategy = strategy
        self._max_tokens = None if open_bins is None else open_bins * seq_len
        self._max_age = max_age
        self._held: dict[int, int] = {}
        # The lengths in rising order and, beside each, its ticket; tickets rise where lengths are equal.
        self._lengths: list[int] = []
        self._tickets: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        """Return how many documents are held."""
        return len(self._lengths)

    @property
    def ages(self) -> list[int]:
        """Return how many documents came after each one held, oldest first."""
        return [self._next - 1 - ticket for ticket in self._held]

    @property
    def is_ripe(self) -> bool:
        """Return whether a row has to close."""
        if not self._lengths:
            return False
        if self._max_age is not None and self._next > next(iter(self._held)) + self._max_age:
            return True
        if self._max_tokens is not None:
            return self.num_tokens >= self._max_tokens
        return len(self._lengths) >= _LOOK_AHEAD and self.num_tokens >= _MIN_OPEN * self._seq_len

    def add(self, length: int) -> int:
        """Take a document of 1 to `seq_len` tokens and return its ticket."""
        self._next += 1
        self._insert(self._next - 1, length)
        return self._next - 1

    def pass_by(self) -> None:
        """Count a document that needs no row from here."""
        self._next += 1

    def restore(self, lengths: Iterable[int], ages: Iterable[int]) -> list[int]:
        """Hold just documents of these lengths and ages, oldest first, and return their tickets."""
        self.num_tokens, self._next = 0, 0
        self._held, self._lengths, self._tickets = {}, [], []
        for length, age in zip(lengths, ages, strict=True):
            self._insert(-1 - age, length)
        return list(self._held)

    def close(self) -> list[int]:
        """Return the tickets of the next row, rising, and forget those documents. The oldest one is always among them."""
        oldest = next(iter(self._held))
        row = [oldest]
        room = self._seq_len - self._take(oldest)
        fill = self._fill_first if self._strategy == "first_fit" else self._fill_best
        fill(row, room)
        row.sort()
        return row

    def _fill_first(self, row: list[int], room: int) -> None:
        """Go through the documents in their order and take each that fits: what first fit with open rows does, row by row."""
        for ticket, length in list(self._held.items()):
            if not self._lengths or self._lengths[0] > room:
                return
            if length <= room:
                room -= self._take(ticket)
                row.append(ticket)

    def _fill_best(self, row: list[int], room: int) -> None:
        lengths = self._lengths
        while lengths and lengths[0] <= room:
            if room * len(lengths) > _REACH * self.num_tokens:
                chosen = [next(ticket for ticket, length in self._held.items() if length <= room)]
            else:
                chosen = self._best_pair(room)
            room -= sum(map(self._take, chosen))
            row += chosen

    def _best_pair(self, room: int) -> list[int]:
        """Return the one document, or the two, that leave the least of `room`; one if two are no better, the oldest of a length."""
        lengths = self._lengths
        longest = bisect_right(lengths, room) - 1
        best, chosen = lengths[longest], [longest]
        # From two halves of the room outwards: no better pair is passed over, and small documents are kept for small gaps.
        low = bisect_right(lengths, room // 2) - 1
        high = low + 1
        for _ in range(_MAX_STEPS):
            if low < 0 or high > longest or best == room:
                break
            total = lengths[low] + lengths[high]
            if total > room:
                low -= 1
                continue
            if total > best:
                best, chosen = total, [low, high]
            high += 1
        return self._oldest_of(chosen)

    def _oldest_of(self, places: list[int]) -> list[int]:
        """Return the oldest tickets with the lengths at these one or two places, which rise."""
        first = bisect_left(self._lengths, self._lengths[places[0]])
        if len(places) == 1:
            return [self._tickets[first]]
        second = max(first + 1, bisect_left(self._lengths, self._lengths[places[1]]))
        return [self._tickets[first], self._tickets[second]]

    def _insert(self, ticket: int, length: int) -> None:
        at = bisect_right(self._lengths, length)
        self._lengths.insert(at, length)
        self._tickets.insert(at, ticket)
        self._held[ticket] = length
        self.num_tokens += length

    def _take(self, ticket: int) -> int:
        """Forget a document and return its length."""
        length = self._held.pop(ticket)
        first = bisect_left(self._lengths, length)
        at = first
        if self._tickets[first] != ticket:
            at = bisect_left(self._tickets, ticket, first, bisect_right(self._lengths, length))
        del self._lengths[at], self._tickets[at]
        self.num_tokens -= length
        return length


def pack_lengths(
    lengths: Iterable[int],
    seq_len: int,
    *,
    strategy: FitStrategy = "best_fit",
    open_bins: int | None = None,
    max_age: int | None = None,
) -> Iterator[list[int]]:
    """Yield the rows that documents of these lengths are packed in, each as the rising indices of its documents.

    Every length is from 1 to `seq_len`; every document is in one row, whole. Rows are those of `Pack` with the same options and
    are yielded as they close, so that `lengths` may be endless. See `OpenRows` for the options.
    """
    rows = OpenRows(seq_len, strategy=strategy, open_bins=open_bins, max_age=max_age)
    for length in lengths:
        rows.add(length)
        while rows.is_ripe:
            yield rows.close()
    while len(rows):
        yield rows.close()
