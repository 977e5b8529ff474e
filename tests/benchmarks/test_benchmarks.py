"""The suite runs, compares like with like, and writes what it found. Its numbers are not looked at here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONTESTANTS = "aioloader,dataloader-iterable,grain,nothing"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def bench(tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--json", str(out), "--cache", str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return done.stdout, found


@pytest.mark.parametrize(
    ("workload", "numbers"),
    [
        ("overhead", {"rate_per_s", "cpu_us_per_record", "trainer_us_per_record", "workers_us_per_record"}),
        ("large", {"rate_per_s", "cpu_us_per_record"}),
        ("start", {"first_batch_ms"}),
        ("handover", {"p50_us", "p99_us", "cold_us"}),
        ("handover-async", {"p50_us", "p99_us", "cold_us"}),
        ("harm-4ms", {"slowdown_pct", "slowdown_p95_pct", "step_ms"}),
        ("memory", {"peak_mib"}),
    ],
)
def test_each_way_of_measuring_gives_its_numbers(tmp_path: Path, workload: str, numbers: set[str]) -> None:
    text, found = bench(tmp_path, "--workloads", workload, "--contestants", CONTESTANTS)
    (result,) = found["workloads"]
    rows = {row["contestant"]: row["numbers"] for row in result["rows"]}
    assert {"aioloader", "dataloader-iterable"} <= rows.keys()
    assert all(numbers <= row.keys() for row in rows.values())
    assert all(row["cpu_total_s"]["median"] > 0 for row in rows.values())
    assert result["disagreements"] == []
    assert found["command"].startswith("python -m tests.benchmarks --quick")
    assert {"machine", "versions", "date"} <= found.keys()
    assert f"{workload}: " in text
    assert "aioloader " in text


def test_resuming_gives_the_numbers_at_their_places(tmp_path: Path) -> None:
    """Only aioloader takes part, from the record and from the beginning, on which all are compared by positions in the order."""
    text, found = bench(tmp_path, "--workloads", "resume")
    (result,) = found["workloads"]
    assert {row["contestant"] for row in result["rows"]} == {"aioloader", "aioloader-thread", "cold", "cold-thread"}
    assert all("first_batch_ms" in row["numbers"] for row in result["rows"])
    assert result["disagreements"] == []
    assert result["goals"][0]["text"] == "aioloader first_batch_ms / cold at most 1.2"
    assert text.splitlines()[-1].startswith("not measured: object store")


def test_killing_workers_gives_its_numbers(tmp_path: Path) -> None:
    """Only aioloader takes part: the others end with their worker."""
    _, found = bench(tmp_path, "--workloads", "replacement")
    (result,) = found["workloads"]
    assert {row["contestant"] for row in result["rows"]} == {"aioloader", "aioloader-thread"}
    assert all({"p50_ms", "max_ms", "delivered_p50_ms"} <= row["numbers"].keys() for row in result["rows"])
    assert result["disagreements"] == []
