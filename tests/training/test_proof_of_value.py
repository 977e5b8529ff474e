"""Ten steps uninterrupted equal five, a kill, a restart and five more: every bit of losses, batches and parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.training.proof_cases import CASES
from tests.training.proof_runs import KILLED_IN, NUM_LANES, NUM_STEPS, SAVED_AT
from tests.training.ranks import ROOT

pytestmark = pytest.mark.timeout(240)

Log = list[dict[str, Any]]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Log]:
    """Return the lines that each rank of each run has logged."""
    root = tmp_path_factory.mktemp("runs")
    for hash_seed, stage in enumerate(("begin", "resume")):
        environment = os.environ | {"PYTHONPATH": str(ROOT / "examples"), "PYTHONHASHSEED": str(hash_seed)}
        command = [sys.executable, "-W", "error", "-m", "tests.training.proof_runs", stage, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in root.glob("*.rank*.jsonl")}


def batches(log: Log) -> list[tuple[Any, Any]]:
    """Return (records, description) of each micro-batch."""
    return [pair for entry in log if "step" in entry for pair in zip(entry["records"], entry["batches"], strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_goes_on_bit_for_bit(case: str, logs: dict[str, Log]) -> None:
    whole, killed, resumed = (logs[f"{case}.{name}.rank0"] for name in ("uninterrupted", "killed", "resumed"))
    assert [entry.get("step") for entry in whole] == [*range(1, NUM_STEPS + 1), None]
    assert killed == whole[: KILLED_IN - 1]
    assert resumed == whole[SAVED_AT:]


@pytest.mark.parametrize("case", CASES)
def test_the_runs_could_differ(case: str, logs: dict[str, Log]) -> None:
    """Each step has its own data and its own loss, and the model learns."""
    whole = logs[f"{case}.uninterrupted.rank0"][:-1]
    losses = [float.fromhex(entry["loss"]) for entry in whole]
    assert len(set(losses)) == NUM_STEPS
    assert losses[-1] < losses[0]
    assert len({batch["digest"] for _, batch in batches(whole)}) == NUM_STEPS * NUM_LANES


def test_two_ranks_were_killed_and_one_goes_on(logs: dict[str, Log]) -> None:
    whole = logs["packed_text.uninterrupted.rank0"]
    killed = [logs[f"packed_text.killed_on_two_ranks.rank{rank}"] for rank in range(2)]
    assert len(killed[0]) == len(killed[1]) == KILLED_IN - 1
    for first, second, expected in zip(*killed, whole, strict=False):
        assert first["loss"] == second["loss"] == expected["loss"]
        assert batches([first, second]) == batches([expected])
    assert logs["packed_text.resumed_on_one_rank.rank0"] == whole[SAVED_AT:]


def test_text_was_packed(logs: dict[str, Log]) -> None:
    found = batches(logs["packed_text.uninterrupted.rank0"])
    assert all(batch["shape"] == [2, 128] for _, batch in found)
    assert sum(batch["num_pieces"] for _, batch in found) > 3 * len(found)


def test_chats_were_bucketed(logs: dict[str, Log]) -> None:
    shapes = {tuple(batch["shape"]) for _, batch in batches(logs["bucketed_chats.uninterrupted.rank0"])}
    assert len(shapes) > 3
    assert all(num_rows == (8 if width <= 32 else 4 if width <= 64 else 2) for num_rows, width in shapes)


def test_the_mixture_went_up_the_ramp(logs: dict[str, Log]) -> None:
    records = [record for group, _ in batches(logs["ramped_mixture.uninterrupted.rank0"]) for record in group]
    from_code = [shard.startswith("code/") for shard, _ in records]
    assert sum(from_code[:30]) > 20
    assert 0 < sum(from_code[-30:]) < 15


def test_images_were_augmented_anew_in_each_epoch(logs: dict[str, Log]) -> None:
    seen: dict[int, list[str]] = {}
    for records, batch in batches(logs["augmented_images.uninterrupted.rank0"]):
        for (_, row), pixels in zip(records, batch["rows"], strict=True):
            seen.setdefault(row, []).append(pixels)
    twice = [pixels for pixels in seen.values() if len(pixels) == 2]
    assert len(seen) == 48
    assert len(twice) == 32
    assert all(first != second for first, second in twice)
