"""The log of JSON lines: one for each window, without those that a resumed run does again."""

from __future__ import annotations

import json
from pathlib import Path

from aioloader.training.json_lines_log import JsonLinesLog
from tests.training.test_averages import report


def lines(path: Path) -> list[tuple[int, float]]:
    return [(entry["step"], entry["train/loss"]) for entry in map(json.loads, path.read_text().splitlines())]


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "steps.jsonl"
    with JsonLinesLog(path, every=2) as log:
        for step in range(1, 6):
            log(report(step, loss=float(step)))
        assert lines(path) == [(2, 1.5), (4, 3.5)]


def test_a_resumed_run_takes_its_steps_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with JsonLinesLog(path) as log:
        for step in range(1, 8):
            log(report(step))
    with path.open("a") as file:
        file.write('{"step": 8, "train/lo')  # killed while writing
    with JsonLinesLog(path) as log:
        log(report(5, loss=9.0))
    assert lines(path) == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0), (5, 9.0)]


def test_other_ranks_write_no_file(tmp_path: Path) -> None:
    with JsonLinesLog(tmp_path / "steps.jsonl") as log:
        log(report(1, dp_rank=1))
    assert list(tmp_path.iterdir()) == []
