"""Checkpoints written while training goes on: what was there at the border, one at a time, never half of one. Two ranks: test_run.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.training import StepReport, Trainer, latest_checkpoint, load_checkpoint
from aioloader.training.checkpoints import files
from aioloader.training.checkpoints.background_save import BackgroundSaver
from aioloader.training.checkpoints.snapshot import TrainingParts
from aioloader.training.groups.dp_group import DataParallelGroup
from tests.training.fake_loader import FakeLoader, TinyModel, language_batches
from tests.training.ranks import ROOT

LIMIT_S = 15.0


class HeldWriter:
    """Holds a save before it begins to write, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.go_on = threading.Event(), threading.Event()
        prepare = files.prepare

        def held(directory: Path, step: int) -> Path:
            self.arrived.set()
            assert self.go_on.wait(LIMIT_S)
            return prepare(directory, step)

        monkeypatch.setattr(files, "prepare", held)


def parts_after_a_step(seed: int) -> TrainingParts:
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return TrainingParts(model=model, optimizer=optimizer)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def one_rank() -> DataParallelGroup:
    return DataParallelGroup.resolve(Mesh())


def test_the_snapshot_stays_as_it_was_while_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, parts = HeldWriter(monkeypatch), parts_after_a_step(1)
    assert parts.optimizer is not None
    loader_state = {"lanes": {"0": {"seq": 7}}}
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in parts.optimizer.state_dict()["state"].values()]
    with BackgroundSaver(tmp_path, one_rank(), 2) as saver:
        saver.start(parts.snapshot(4, loader_state, {"num_skipped": 0}, whole=True, copied=True))
        assert held.arrived.wait(LIMIT_S)
        step(parts.model, parts.optimizer)
        loader_state["lanes"]["0"]["seq"] = 8
        held.go_on.set()
        path = saver.finish()
    assert path == latest_checkpoint(tmp_path) == tmp_path / "step_00000004"
    fresh = parts_after_a_step(2)
    loaded = load_checkpoint(path, fresh.model, fresh.optimizer)
    assert loaded.loader_state == {"lanes": {"0": {"seq": 7}}}
    assert fresh.optimizer is not None
    assert all(torch.equal(value, before[name]) for name, value in fresh.model.state_dict().items())
    assert not any(torch.equal(value, before[name]) for name, value in parts.model.state_dict().items())
    found = [state["exp_avg"] for state in fresh.optimizer.state_dict()["state"].values()]
    assert all(torch.equal(one, other) for one, other in zip(found, moments, strict=True))


def test_one_save_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, parts = HeldWriter(monkeypatch), parts_after_a_step(1)
    with BackgroundSaver(tmp_path, one_rank(), None) as saver:
        saver.start(parts.snapshot(1, None, None, whole=True, copied=True))
        assert held.arrived.wait(LIMIT_S)
        assert files.latest_checkpoint(tmp_path) is None
        threading.Timer(0.05, held.go_on.set).start()
        saver.start(parts.snapshot(2, None, None, whole=True, copied=True))
        assert (tmp_path / "step_00000001").is_dir()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_a_failure_is_raised_once_at_the_next_chance(tmp_path: Path) -> None:
    parts = parts_after_a_step(1)
    with BackgroundSaver(tmp_path, one_rank(), 2) as saver:
        saver.start(parts.snapshot(1, {"not": ("json",)}, None, whole=True, copied=True))
        with pytest.raises(ConfigError, match=r"loader_dp00000\.json: expected data that JSON keeps unchanged"):
            saver.finish()
        assert saver.finish() is None
    assert latest_checkpoint(tmp_path) is None


def test_a_failure_that_nobody_asked_for_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = parts_after_a_step(1)
    with BackgroundSaver(tmp_path, one_rank(), 2) as saver:
        saver.start(parts.snapshot(1, {"not": ("json",)}, None, whole=True, copied=True))
    assert "The last checkpoint was not saved: checkpoint, loader_dp00000.json" in caplog.text


def train(directory: Path | None, max_steps: int, **options: Any) -> list[StepReport]:
    reports: list[StepReport] = []
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    options = {"checkpoint_dir": directory, "on_step": reports.append, **options}
    Trainer(model, FakeLoader(language_batches(12), 1), optimizer, max_steps=max_steps, **options).train()
    return reports


class TupleState(FakeLoader):
    """Gives a state that JSON would change."""

    def state_dict(self, *, after: Any) -> Any:
        return {"next": (after.index + 1,)}


def test_a_failure_ends_training_at_a_border(tmp_path: Path) -> None:
    model, reports = TinyModel(), list[StepReport]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "checkpoint_async": True, "on_step": reports.append}
    with pytest.raises(ConfigError, match="expected data that JSON keeps unchanged"):
        Trainer(model, TupleState(language_batches(12), 1), optimizer, max_steps=10, **options).train()
    assert 2 <= len(reports) <= 4  # at the latest when the second one is to be saved
    assert latest_checkpoint(tmp_path) is None


KILLED = """
import sys, threading
from pathlib import Path
from aioloader.training.checkpoints import files
from tests.training.checkpoints.test_background_save import train

publish = files.publish

def never(directory, step, dp_size):
    if step < 4:
        return publish(directory, step, dp_size)
    print("written, not published", flush=True)
    threading.Event().wait()

files.publish = never
train(Path(sys.argv[1]), 12, checkpoint_every=2, checkpoint_async=True, on_step=lambda report: print(report.step, flush=True))
"""


@pytest.mark.timeout(60)
def test_a_kill_in_the_middle_of_writing_leaves_the_one_before(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        seen = [next(process.stdout).strip() for _ in range(7)]  # six steps: the sixth ended while the fourth was being written
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert sorted(seen) == ["1", "2", "3", "4", "5", "6", "written, not published"]
    assert (tmp_path / ".step_00000004.partial" / ".metadata").is_file()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000002"
    whole, resumed = train(None, 8), train(tmp_path, 8)
    assert [(report.step, report.loss) for report in resumed] == [(report.step, report.loss) for report in whole[2:]]
