"""The elastic restart, on real ranks that are killed, ends in what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "elastic_restart.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_go_on_where_four_were_killed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE), "--output", str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = done.stdout.splitlines()[-2:]
    assert first.startswith("4 ranks, 7 steps and a kill; 2 ranks from step 5")
    assert last == "elastic restart, 10 steps, bit for bit: records equal, loss equal, weights equal"
