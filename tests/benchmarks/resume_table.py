"""How long until the first micro-batch: from the beginning, and resumed at record 10^8 of an indexed source, each in a fresh process.

    python -m tests.benchmarks.resume_table [--runs 5]

10^9 records in 10^5 shards, shuffled. The rank's state at the record is written down, not run up to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from aioloader import FixedBatch, Loader, Shuffle, StackCollator
from tests.benchmarks.machine import describe_machine

_NUM_SHARDS = 100_000
_SHARD_SIZE = 10_000
_RECORD = 100_000_000
_BATCH = 64


class Shards:
    """10^9 records that are made when they are asked for."""

    fetches_many = True

    def __init__(self) -> None:
        self.shard_sizes = np.full(_NUM_SHARDS, _SHARD_SIZE)

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard."""
        return f"shard-{shard:05}"

    def start_epoch(self, epoch: int) -> None:
        """Do nothing."""

    def fetch(self, shard: int, rows: Sequence[int]) -> list[int]:
        """Return numbers."""
        return [shard * _SHARD_SIZE + row for row in rows]

    def fingerprint(self) -> dict[str, Any]:
        """Return the sizes."""
        return {"kind": "shards", "num_shards": _NUM_SHARDS, "shard_size": _SHARD_SIZE}

    def open(self, epoch: int, cursor: Any) -> Any:
        """Never called: it is read by shard and row."""
        raise NotImplementedError


def sample(number: int) -> dict[str, Any]:
    """Return a small sample."""
    return {"x": np.full(8, number)}


def first_batch_s(record: int) -> float:
    """Return the seconds from making a loader to its first micro-batch, resumed at a record."""
    started = time.perf_counter()
    options: dict[str, Any] = {"batch": FixedBatch(_BATCH), "collate": StackCollator(), "shuffle": Shuffle(seed=1), "workers": 2}
    with Loader(Shards(), preprocess=sample, **options) as loader:
        if record:
            loader.load_state_dict(_state_at(loader.state_dict(), record))
        batch = next(iter(loader))
        assert batch.step == record // _BATCH
        return time.perf_counter() - started


def _state_at(state: Any, record: int) -> Any:
    state = json.loads(json.dumps(state))
    state["source"].update(position=record, cursor=record)
    state["lanes"]["0"].update(seq=record, step=record // _BATCH)
    return state


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--record", type=int, help="measure one start in this process, and print its seconds")
    chosen = parser.parse_args()
    if chosen.record is not None:
        print(first_batch_s(chosen.record))
        return
    seconds: dict[int, list[float]] = {0: [], _RECORD: []}
    for _ in range(chosen.runs):
        for record in seconds:
            command = [sys.executable, "-m", "tests.benchmarks.resume_table", "--record", str(record)]
            seconds[record].append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    cold, resumed = (statistics.median(times) for times in seconds.values())
    print(describe_machine())
    print(
        f"first micro-batch from the beginning: {cold:.3f} s; at record {_RECORD:,}: {resumed:.3f} s; ratio {resumed / cold:.2f} (goal 1.2)"
    )


if __name__ == "__main__":
    main()
