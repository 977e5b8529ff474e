"""The tensor-parallel example, on four real ranks, ends in what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tensor_parallel.py"


@pytest.mark.timeout(120)
def test_peers_get_the_same_data_and_replicas_stay_equal() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "tensor parallel: peers train on the same data: True; replicas are equal: True"
