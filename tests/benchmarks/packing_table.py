"""Prints how full the packing strategies make rows, and what they cost: `python -m tests.benchmarks.packing_table`.

Documents have lognormal lengths. All strategies pack all tokens: full rows are cut off a document longer than a row, and its rest is
packed. "bins" is the usual bounded best fit, where a document gets its place for good as it comes, for comparison. The time is
that of the algorithm on plain lengths, the median of five runs; greedy is timed on the same terms, as a running sum.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from aioloader.batching.bins import FitStrategy, OpenRows
from tests.benchmarks.machine import describe_machine, describe_versions

__all__ = ["main"]

_NUM_DOCUMENTS = 100_000
_MEAN_TOKENS, _SIGMA = 800, 1.0
_SEQ_LENS = (2048, 8192)
_NUM_RUNS = 5


class Packed(NamedTuple):
    """Rows made of documents, how many of those were cut though they fit in a row, and how many were held at most."""

    num_rows: int
    num_cut: int
    num_held: int


def greedy(lengths: Sequence[int], seq_len: int) -> Packed:
    """Lay the documents end to end and cut at row ends."""
    ends = list(itertools.accumulate(lengths))
    num_cut = sum((end - length) // seq_len != (end - 1) // seq_len for length, end in zip(lengths, ends, strict=True))
    return Packed(-(-ends[-1] // seq_len), num_cut, max(1, seq_len * len(lengths) // ends[-1]))


def by_fit(strategy: FitStrategy, open_bins: int | None) -> Callable[[Sequence[int], int], Packed]:
    """Return what packs as `Pack` does."""

    def pack(lengths: Sequence[int], seq_len: int) -> Packed:
        rows = OpenRows(seq_len, strategy=strategy, open_bins=open_bins)
        num_rows, num_held = 0, 0
        for length in lengths:
            rows.add(length)
            num_held = max(num_held, len(rows))
            while rows.is_ripe:
                rows.close()
                num_rows += 1
        while len(rows):
            rows.close()
            num_rows += 1
        return Packed(num_rows, 0, num_held)

    return pack


def by_bins(num_bins: int) -> Callable[[Sequence[int], int], Packed]:
    """Return best fit with so many bins: a document goes to the fullest bin that has room; if none has, the fullest closes."""

    def pack(lengths: Sequence[int], seq_len: int) -> Packed:
        bins: list[tuple[int, int]] = []  # room, documents
        num_rows, num_held, most_held = 0, 0, 0
        for length in lengths:
            at = bisect_left(bins, (length, 0))
            room, count = bins.pop(at) if at < len(bins) else (seq_len, 0)
            if not count and len(bins) == num_bins:
                num_rows += 1
                num_held -= bins.pop(0)[1]
            insort(bins, (room - length, count + 1))
            num_held += 1
            most_held = max(most_held, num_held)
        return Packed(num_rows + len(bins), 0, most_held)

    return pack


STRATEGIES: dict[str, Callable[[Sequence[int], int], Packed]] = {
    "greedy": greedy,
    "first_fit": by_fit("first_fit", None),
    "best_fit": by_fit("best_fit", None),
    "best_fit, open_bins=4": by_fit("best_fit", 4),
    "best_fit, open_bins=16": by_fit("best_fit", 16),
    "best_fit, open_bins=64": by_fit("best_fit", 64),
    "bins: 16": by_bins(16),
    "bins: 256": by_bins(256),
}


def draw_lengths(seq_len: int) -> tuple[list[int], int]:
    """Return the lengths of documents and rests to be packed, and the rows that were cut off long documents."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(_MEAN_TOKENS) - _SIGMA**2 / 2, _SIGMA, _NUM_DOCUMENTS).astype(int).clip(1)
    rests = (lengths % seq_len).tolist()
    return [rest for rest in rests if rest], int((lengths // seq_len).sum())


def measure(pack: Callable[[Sequence[int], int], Packed], lengths: Sequence[int], seq_len: int) -> tuple[Packed, float]:
    """Return the rows and the median of the seconds that they took."""
    seconds = []
    for _ in range(_NUM_RUNS):
        start = time.perf_counter()
        packed = pack(lengths, seq_len)
        seconds.append(time.perf_counter() - start)
    return packed, statistics.median(seconds)


def main() -> None:
    """Print one table for each row length."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    machine, versions = describe_machine(), describe_versions()
    print(f"{machine['processor']}, {machine['cores']} cores, load {machine['load_before']}; Python {versions['python']}")
    for seq_len in _SEQ_LENS:
        lengths, num_full = draw_lengths(seq_len)
        print(f"\n{_NUM_DOCUMENTS:,} documents, lognormal, mean {_MEAN_TOKENS}, sigma {_SIGMA}; rows of {seq_len:,} tokens")
        print(f"{'strategy':24}{'rows':>8}{'use %':>9}{'documents cut':>16}{'held':>7}{'us/document':>13}")
        for name, pack in STRATEGIES.items():
            packed, seconds = measure(pack, lengths, seq_len)
            num_rows = packed.num_rows + num_full
            use = 100 * (sum(lengths) + num_full * seq_len) / (num_rows * seq_len)
            cost = 1e6 * seconds / len(lengths)
            print(f"{name:24}{num_rows:>8,}{use:>9.2f}{packed.num_cut:>16,}{packed.num_held:>7,}{cost:>13.2f}")


if __name__ == "__main__":
    main()
