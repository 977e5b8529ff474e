"""The example of the four steps from text to training (tokenize and pack, write, map and sample, prefetch), on two real ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_packed.py"


def run(output: Path, steps: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run([*command, "--output", str(output), "--steps", str(steps)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_rank_writes_the_files_and_both_train_on_them(tmp_path: Path) -> None:
    prepared, last = run(tmp_path, 20)
    assert re.fullmatch(r"300 documents, [\d,]+ tokens: (written, reused|reused, written)", prepared), prepared
    found = re.fullmatch(r"packed: ([\d,]+) rows, 20 steps, loss (\d+\.\d+) -> (\d+\.\d+)", last)
    assert found, last
    assert float(found[3]) < float(found[2]) - 1
    prepared, last = run(tmp_path, 2)
    assert prepared.endswith("tokens: reused, reused")
    assert last.startswith(f"packed: {found[1]} rows, 2 steps, loss {found[2]} ->")
