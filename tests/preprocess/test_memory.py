"""The memory of preprocessing does not grow with the input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preprocess.cases import write_lines

SCRIPT = """
import sys
from pathlib import Path
from tests.preprocess.cases import run
for name in ("small", "large"):
    run(f"{sys.argv[1]}/{name}.jsonl", Path(sys.argv[2]), Path(sys.argv[1]) / name, save_every_s=2.0)
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))  # its peak, in KiB
"""
ROOT = Path(__file__).parents[2]
TEXT = Path(json.__file__).read_text()[:1500]


@pytest.mark.timeout(60)
def test_six_times_the_text_takes_no_more_memory(tokenizer: Path, tmp_path: Path) -> None:
    """C010: a list of the two million tokens would take 16 MB for its entries alone."""
    for name, number in (("small", 400), ("large", 2400)):
        write_lines(tmp_path / f"{name}.jsonl", [TEXT] * number)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(tokenizer)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/examples"}
    )
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())
    assert (large - small) * 1024 < 8e6
