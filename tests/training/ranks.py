"""Real ranks for tests: processes with a gloo group, forked from one interpreter that has imported torch once."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

Store: TypeAlias = Any
"""A `torch.distributed.Store`, for signals between the ranks."""

Case: TypeAlias = Callable[[int, Store], Any]
Result: TypeAlias = Any

LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]


def run_ranks(world_size: int, case: Case, *, exit_code: int = 0) -> list[Result]:
    """Run `case(rank, store)` on every rank, with RANK and WORLD_SIZE set and a default group, and return the JSON results by rank."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # loads here, once, what every rank would load for its first optimizer (over a second)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(world_size):
            receiving, sending = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(target=_rank, args=(rank, world_size, case, f"{directory}/store", sending))
            process.start()
            sending.close()
            ranks.append((process, receiving))
        try:
            return [_result(process, receiving, exit_code) for process, receiving in ranks]
        finally:
            for process, receiving in ranks:
                process.kill()
                process.join()
                receiving.close()


def run_cases(module: str, directory: Path) -> dict[str, Any]:
    """Run `python -m module results.json` in an interpreter of its own and return what it wrote."""
    path = directory / "results.json"
    command = [sys.executable, "-W", "error", "-m", module, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def _rank(rank: int, world_size: int, case: Case, path: str, sending: Connection) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
    if world_size > 1:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    sending.send(json.dumps(case(rank, store)))


def _result(process: BaseProcess, receiving: Connection, exit_code: int) -> Result:
    try:
        result = json.loads(receiving.recv()) if receiving.poll(LIMIT_S) else None
    except EOFError:
        result = None
    process.join(LIMIT_S)
    assert process.exitcode == exit_code, f"{process.name} ended with {process.exitcode}"
    return result
