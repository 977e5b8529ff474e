"""Workloads that need no data: no work at all, a Python loop, large samples, a heavy tail."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass

import numpy as np

from tests.benchmarks.work import Array, Sample, Stacked

__all__ = ["Arrays", "HeavyTail", "PythonLoop", "SignedLoop", "Tokens", "iterations_for", "python_loop"]

_ROWS = 4096
_HEAVY_SHARE = 0.005
_HEAVY_FACTOR = 60
_KNUTH = 2654435761  # spreads consecutive indices over 32 bits


@functools.cache
def _token_table(length: int) -> Array:
    return np.random.default_rng(0).integers(0, 50_000, size=(_ROWS, length), dtype=np.int64)


def python_loop(iterations: int) -> int:
    """Return a number that takes `iterations` turns of a Python loop to find."""
    total = 1
    for turn in range(iterations):
        total = (total * 31 + turn) & 0xFFFFFF
    return total


def iterations_for(duration_s: float) -> int:
    """Return how many iterations of `python_loop` take `duration_s` on this machine when nothing disturbs it."""
    probe = 20_000
    fastest = min(_timed(probe) for _ in range(20))
    return max(1, round(probe * duration_s / fastest))


def _timed(iterations: int) -> float:
    started = time.perf_counter()
    python_loop(iterations)
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Stacked):
    """Rows of a table of `int64[length]`: what is measured is the cost of moving them."""

    length: int = 64

    def sample(self, record: int) -> Sample:
        return {"input_ids": _token_table(self.length)[record % _ROWS]}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonLoop(Stacked):
    """A loop in Python for each record, then a small sample."""

    iterations: int

    def sample(self, record: int) -> Sample:
        found = python_loop(self.iterations)
        return {"input_ids": _token_table(64)[record % _ROWS] ^ found}


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedLoop(Stacked):
    """A loop in Python for each record, and a sample that says which process made it, and when. A new process need not prepare anything."""

    iterations: int
    window: int = 32

    def sample(self, record: int) -> Sample:
        found = python_loop(self.iterations)
        return {"input_ids": np.full(64, record ^ found), "made": np.array([os.getpid(), time.monotonic_ns()])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays(Stacked):
    """Large samples: `float32[side, side]`, filled with a number that tells them apart."""

    side: int = 1024
    window: int = 32
    is_large: bool = True

    def sample(self, record: int) -> Sample:
        return {"pixels": np.full((self.side, self.side), record % 65_536, dtype=np.float32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyTail(Stacked):
    """Each record waits `wait_s`, one in 200 waits 60 times as long.

    It waits and does not compute, so that waiting for the order is measured, and not competition for cores.
    """

    wait_s: float

    def sample(self, record: int) -> Sample:
        is_heavy = (record * _KNUTH) % 2**32 < _HEAVY_SHARE * 2**32
        time.sleep(self.wait_s * (_HEAVY_FACTOR if is_heavy else 1))
        return {"input_ids": _token_table(64)[record % _ROWS]}
