"""Runs one task in this process: `python -m tests.benchmarks.child TASK FILE` writes the measurement to the file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from tests.benchmarks.contestants import CONTESTANTS
from tests.benchmarks.digest import Digest
from tests.benchmarks.task import Measurement, Task
from tests.benchmarks.workloads import WORKLOADS

__all__ = ["run"]


def run(task: Task) -> Measurement:
    """Return what `task` asks for. Torch is there before any loader starts, as in a trainer."""
    importlib.import_module("torch")
    workload = WORKLOADS[task.workload]
    work = workload.make(task.num_records, task.settings)
    feed = CONTESTANTS[task.contestant].open(work, task.settings.workers)
    return workload.measure(feed, work, Digest(is_full=task.is_check), task)


def main() -> None:
    task, answer = sys.argv[1:]
    measurement = run(Task.from_json(task))
    Path(answer).write_text(measurement.to_json())


if __name__ == "__main__":
    main()
