"""The real loader under torchrun: ranks share the data out, and train what one process trains on the same global batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.loader_script import NUM_RECORDS

ROOT = Path(__file__).resolve().parents[2]


def train(directory: Path, *launcher: str) -> None:
    command = [sys.executable, *launcher, "-m", "tests.training.loader_script", str(directory)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=80, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(120)
def test_two_ranks_share_the_data_and_train_like_one(tmp_path: Path) -> None:
    train(tmp_path)
    train(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    alone, first, second = (json.loads((tmp_path / f"of{name}.json").read_text()) for name in ("1rank0", "2rank0", "2rank1"))

    records = [set(chain.from_iterable(rank["records"])) for rank in (first, second)]
    assert not records[0] & records[1]
    assert records[0] | records[1] == set(range(NUM_RECORDS)) == set(chain.from_iterable(alone["records"]))

    assert first["num_steps"] == second["num_steps"] == alone["num_steps"] == 20
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert first["parameters"] == second["parameters"]
    for name, value in alone["parameters"].items():
        torch.testing.assert_close(_tensor(first["parameters"][name]), _tensor(value), rtol=1e-6, atol=1e-7)


def _tensor(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
