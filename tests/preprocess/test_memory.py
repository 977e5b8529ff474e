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
import os, sys, threading
from pathlib import Path
from tests.benchmarks.tree import tree_pss_bytes
from tests.preprocess.cases import run

for name in ("small", "large"):
    sizes, over = [], threading.Event()
    def watch():
        while not over.wait(0.05):
            sizes.append(tree_pss_bytes(os.getpid()))
    watcher = threading.Thread(target=watch)
    watcher.start()
    run(f"{sys.argv[1]}/{name}.jsonl", Path(sys.argv[2]), Path(sys.argv[1]) / name, save_every_s=2.0, workers=int(sys.argv[3]))
    over.set()
    watcher.join()
    print(max(sizes))
"""
ROOT = Path(__file__).parents[2]
TEXT = Path(json.__file__).read_text()[:10_000]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("workers", "small", "large"), [(0, 200, 1200), (2, 800, 2400)])
def test_more_text_takes_no_more_memory(workers: int, small: int, large: int, tokenizer: Path, tmp_path: Path) -> None:
    """C010: the 10 or 16 MB of text that the one has more than the other must not be there at its end, in no process of the run."""
    for name, number in (("small", small), ("large", large)):
        write_lines(tmp_path / f"{name}.jsonl", [TEXT] * number)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(tokenizer), str(workers)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/examples"}
    )
    assert done.returncode == 0, done.stderr
    peak_small, peak_large = map(int, done.stdout.split())
    assert peak_large - peak_small < 8e6
