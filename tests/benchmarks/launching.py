"""Launches one task in a fresh process, watches it, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.benchmarks.task import Measurement, Task
from tests.benchmarks.tree import tree_pids, tree_pss_bytes

__all__ = ["ROOT", "LaunchError", "adopt_orphans", "launch"]

ROOT = Path(__file__).parents[2]

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SAMPLE_EVERY_S = 0.25
_STEADY_AFTER = 0.25
"""The first quarter of a run fills buffers; the slope of memory is taken over the rest."""
_MIB = 2**20


class LaunchError(Exception):
    """A task failed; the message is the last of what it wrote."""


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent ended, so that their CPU time is counted."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def launch(task: Task, *, timeout_s: float, watches_memory: bool = False) -> Measurement:
    """Run the task and return its measurement, with `cpu_total_s`: user and system time of the whole tree, start and end included.

    With `watches_memory` also `peak_mib` and `slope_mib_per_million` records.

    Raises:
        LaunchError: The process failed, or took longer than `timeout_s`.
    """
    before_s = _children_cpu_s()
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log.txt"
        command = [sys.executable, "-m", "tests.benchmarks.child", task.to_json(), str(answer)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=_environment(task), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        samples = _wait(process, timeout_s, watches_memory)
        if process.returncode != 0:
            lines = log.read_text(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line and not line.startswith(" ")), f"exit code {process.returncode}")
            raise LaunchError(f"no answer within {timeout_s:.0f} s" if samples is None else reason)
        measurement = Measurement.from_json(answer.read_text())
    numbers = {**measurement.numbers, "cpu_total_s": _children_cpu_s() - before_s}
    if watches_memory and samples:
        numbers.update(_memory(samples, measurement))
    return Measurement(
        numbers=numbers,
        num_records=measurement.num_records,
        content=measurement.content,
        order=measurement.order,
        first_at_s=measurement.first_at_s,
        last_at_s=measurement.last_at_s,
    )


def _environment(task: Task) -> dict[str, str]:
    """Return the environment: the same for all, without the network, quiet."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(Path(task.settings.cache).resolve() / "datasets"),
    }


def _wait(process: subprocess.Popen[bytes], timeout_s: float, watches_memory: bool) -> list[tuple[float, int]] | None:
    """Wait for the end and return samples of (time, bytes); None if it did not end in time. Ends what it left behind."""
    samples: list[tuple[float, int]] = []
    deadline_s = time.monotonic() + timeout_s
    try:
        while process.poll() is None:
            if time.monotonic() > deadline_s:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SAMPLE_EVERY_S)
            if watches_memory and process.returncode is None:
                samples.append((time.monotonic(), tree_pss_bytes(process.pid)))
        return samples
    finally:
        if process.returncode is None:
            _end(process)
        _reap_orphans()


def _end(process: subprocess.Popen[bytes]) -> None:
    for pid in reversed(tree_pids(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _reap_orphans(within_s: float = 2.0) -> None:
    """Wait for adopted descendants to end; after `within_s`, end them."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            if time.monotonic() > deadline_s:
                for left in tree_pids(os.getpid())[1:]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(left, signal.SIGKILL)
            time.sleep(0.01)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _memory(samples: list[tuple[float, int]], measurement: Measurement) -> dict[str, float]:
    """Return the peak, and the slope of a line through the samples after the buffers have filled."""
    duration_s = measurement.last_at_s - measurement.first_at_s
    steady_from_s = measurement.first_at_s + _STEADY_AFTER * duration_s
    peak = max(nbytes for _, nbytes in samples)
    steady = [(at_s, nbytes) for at_s, nbytes in samples if steady_from_s <= at_s <= measurement.last_at_s]
    numbers = {"peak_mib": peak / _MIB}
    if len(steady) >= 3:
        times, sizes = np.array(steady, dtype=np.float64).T
        per_s = float(np.polyfit(times - times[0], sizes, 1)[0])
        numbers["slope_mib_per_million"] = per_s * duration_s / measurement.num_records * 1e6 / _MIB
    return numbers
