"""Ctrl-C ends a script, and a job of several ranks, at once and with one clean traceback for each process that the user started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks.tree import tree_pids
from tests.contract.cases import ROOT, wait_until_dead

GONE_WITHIN_S = 3.0

PROGRAM = """
    import os, sys
    from pathlib import Path

    from aioloader import FixedBatch, Loader

    def preprocess(number):
        return number

    def collate(samples):
        return {"x": samples}

    rank = os.environ.get("RANK", "0")
    for batch in Loader(range(10**9), preprocess=preprocess, batch=FixedBatch(2), collate=collate, workers=2, buffer_size=64):
        if batch.step == 5:
            Path(sys.argv[1], f"running{rank}").touch()
"""


@contextlib.contextmanager
def running(tmp_path: Path, *command: str, num_ranks: int) -> Iterator[subprocess.Popen[str]]:
    """Start a job in a process group of its own and wait until all ranks get batches; end what the block leaves running."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    with subprocess.Popen(
        [sys.executable, *command, str(script), str(tmp_path)], stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    ) as job:
        try:
            while not all((tmp_path / f"running{rank}").exists() for rank in range(num_ranks)):
                assert job.poll() is None, job.communicate()[1]
                time.sleep(0.01)
            yield job
        finally:
            for pid in tree_pids(job.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def end_with_ctrl_c(job: subprocess.Popen[str], *, min_processes: int) -> str:
    """Send Ctrl-C to a whole job, as a terminal does; return what it printed. All its processes must be gone in time."""
    started = tree_pids(job.pid)
    assert len(started) >= min_processes
    signalled = time.monotonic()
    os.killpg(job.pid, signal.SIGINT)
    _, errors = job.communicate(timeout=40)
    left = wait_until_dead(started, signalled + GONE_WITHIN_S - time.monotonic())
    took_s = time.monotonic() - signalled
    print(f"gone after {took_s:.2f} s")
    assert not left
    assert took_s < GONE_WITHIN_S
    return errors


def assert_one_clean_traceback(errors: str) -> None:
    assert errors.startswith("Traceback (most recent call last):\n")
    assert errors.count("Traceback") == 1
    assert errors.endswith("\nKeyboardInterrupt\n")


@pytest.mark.timeout(60)
def test_ctrl_c_ends_a_script_with_one_traceback(tmp_path: Path) -> None:
    with running(tmp_path, num_ranks=1) as job:
        errors = end_with_ctrl_c(job, min_processes=1 + 1 + 1 + 2)  # the script, the zygote, the sidecar, the workers
    assert job.returncode == -signal.SIGINT
    assert_one_clean_traceback(errors)


@pytest.mark.timeout(90)
def test_ctrl_c_ends_all_ranks_of_a_torchrun_job_with_one_traceback_each(tmp_path: Path) -> None:
    """What a rank and its helper processes print goes to one file for each rank; torchrun's own agent adds a traceback of its own."""
    logs = tmp_path / "logs"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--redirects", "3", "--log-dir", str(logs)]
    with running(tmp_path, *launcher, num_ranks=2) as job:
        errors = end_with_ctrl_c(job, min_processes=1 + 2 * (1 + 1 + 1 + 2))  # torchrun, and the same for each rank
    assert job.returncode == 1
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("got signal: 2")
    of_ranks = sorted(logs.glob("**/stderr.log"))
    assert len(of_ranks) == 2
    for log in of_ranks:
        assert_one_clean_traceback(log.read_text())
