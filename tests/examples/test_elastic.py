"""The elastic example ends in what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "elastic.py"


def test_another_number_of_ranks_gives_the_same_batches() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "elastic: 36 micro-batches on 1 rank, and on 4 and then 2 ranks: equal"
