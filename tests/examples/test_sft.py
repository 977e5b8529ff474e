"""The example of supervised fine-tuning, on two real ranks, learns what it promises to."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sft.py"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_only_answers_are_trained_and_the_loss_falls() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(r"sft: 60 steps, (\d+)% of the tokens trained, loss (\d+\.\d+) -> (\d+\.\d+)", last)
    assert found, last
    share, before, after = map(float, found.groups())
    assert 20 < share < 50
    assert after < before / 4
