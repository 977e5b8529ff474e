"""The verdict of the demo, on made-up logs, and the demo itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from demo import CHECKPOINT_AT, KILL_IN, STEPS, Entry, compare

Logs = list[list[Entry]]


def log(first: int, last: int, *, rank: int) -> list[Entry]:
    return [{"step": step, "loss": (1.0 / step).hex(), "records": [[[f"{rank}.py", step]]]} for step in range(first, last + 1)]


@pytest.fixture
def runs() -> tuple[Logs, Logs, Logs]:
    whole = [log(1, STEPS, rank=rank) for rank in (0, 1)]
    before_kill = [log(1, KILL_IN - 1, rank=rank) for rank in (0, 1)]
    interrupted = [before + log(CHECKPOINT_AT + 1, STEPS, rank=rank) for rank, before in enumerate(before_kill)]
    return whole, before_kill, interrupted


def test_equal_runs_are_called_equal(runs: tuple[Logs, Logs, Logs], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*runs) == 0
    assert capsys.readouterr().out.endswith("demo: resumed run equals the uninterrupted one: 20 losses and 40 record ids, bit for bit\n")


@pytest.mark.parametrize(
    ("rank", "step", "change"),
    [
        (0, STEPS, {"loss": (1.0 / STEPS + 1e-17).hex()}),
        (1, CHECKPOINT_AT + 1, {"records": [[["1.py", 0]]]}),
        (1, KILL_IN - 1, {"records": []}),
    ],
)
def test_one_different_bit_is_found(
    runs: tuple[Logs, Logs, Logs], rank: int, step: int, change: Entry, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, interrupted = runs
    index = max(i for i, entry in enumerate(interrupted[rank]) if entry["step"] == step)
    interrupted[rank][index] = interrupted[rank][index] | change
    assert compare(*runs) == 1
    printed = capsys.readouterr().out
    assert printed.count("different") == 1
    assert printed.endswith("demo: the resumed run differs from the uninterrupted one\n")


def test_a_resume_from_elsewhere_is_found(runs: tuple[Logs, Logs, Logs]) -> None:
    _, _, interrupted = runs
    for entries in interrupted:
        del entries[KILL_IN - 1]
    with pytest.raises(SystemExit, match="the resumed run made the steps"):
        compare(*runs)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_ends_with_its_verdict() -> None:
    script = Path(__file__).parents[2] / "examples" / "demo.py"
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("demo: resumed run equals the uninterrupted one: 20 losses and ")
