"""What it costs that ranks agree on the end: `python -m tests.benchmarks.probe_agreement [ranks]`. Prints a table; not a timed test.

Each rank takes micro-batches that are there, and is away for 4 ms after each (asleep: with few cores, ranks that compute would take
them from one another). Not agreed: the same loader where the end is known beforehand.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from aioloader import FixedBatch, Loader, Mesh
from tests.contract.cases import PROCESSES, collate
from tests.training.ranks import Store, run_ranks

NUM_STEPS = 400
STEP_S = 0.004


def identity(number: int) -> int:
    return number


def measure(agreed: bool, lanes: int, prefetch: int) -> list[float]:
    """Return microseconds of the calls at the median and at 9 of 10, their CPU time at the mean, and how often ranks were waited for."""
    mesh = Mesh(dp_rank=dist.get_rank(), dp_size=dist.get_world_size())
    options: dict[str, Any] = {**PROCESSES, "workers": 1, "collate": collate, "mesh": mesh, "lanes": lanes * mesh.dp_size}
    num_records = 8 * lanes * mesh.dp_size * NUM_STEPS
    function = identity if agreed else None
    with Loader(range(num_records), preprocess=function, batch=FixedBatch(8), prefetch_batches=prefetch, **options) as loader:
        seconds, cpu_s = [], 0.0
        batches = iter(loader)
        while True:
            started, began = time.perf_counter(), time.thread_time()
            if next(batches, None) is None:
                break
            seconds.append(time.perf_counter() - started)
            cpu_s += time.thread_time() - began
            time.sleep(STEP_S)
        waits = loader.stats()["waits"]["ranks"]
    found = sorted(second * 1e6 for second in seconds[50:])
    return [statistics.median(found), found[len(found) * 9 // 10], cpu_s / len(seconds) * 1e6, waits["batches"]]


def case(rank: int, store: Store) -> Any:
    torch.set_num_threads(1)
    rows = []
    for lanes, prefetch in ((1, 2), (1, 4), (2, 4)):
        for agreed in (False, True):
            dist.barrier()
            rows.append([lanes, prefetch, agreed, *measure(agreed, lanes, prefetch)])
    return rows


def main() -> None:
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    rows = run_ranks(world_size, case)[0]
    print(f"{world_size} ranks, {platform.machine()}, torch {torch.__version__}; microseconds of a call that returns a micro-batch, rank 0")
    print("lanes  prefetch  agreed  median     p90     cpu  waited for ranks")
    for lanes, prefetch, agreed, median, p90, cpu, waited in rows:
        print(f"{lanes:5}  {prefetch:8}  {agreed!s:6}  {median:6.1f}  {p90:6.1f}  {cpu:6.1f}  {waited:6.0f}")


if __name__ == "__main__":
    main()
