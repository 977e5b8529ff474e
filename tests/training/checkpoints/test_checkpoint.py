"""Checkpoints: every value comes back bit for bit, a crash leaves the last one, what does not fit is refused."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, OneCycleLR, ReduceLROnPlateau

from aioloader.errors import ConfigError, ResumeError
from aioloader.training import latest_checkpoint, load_checkpoint, save_checkpoint

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.9)),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
SCHEDULERS = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=7),
    "steps": lambda optimizer: MultiStepLR(optimizer, [2, 4, 4]),
    "cycle": lambda optimizer: OneCycleLR(optimizer, 0.3, total_steps=20),
}


def build(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model with tied weights, buffers and a layer that no loss uses."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(2, 2)).to(dtype)
    model.get_submodule("2").weight = model.get_submodule("0").weight
    return model


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        loss: torch.Tensor = model[:3](inputs).square().mean()
        assert loss.isfinite()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_same(one: Any, other: Any) -> None:
    """Compare nested states bit for bit, types included."""
    assert isinstance(one, type(other)) or isinstance(other, type(one))
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for item, counterpart in zip(one, other, strict=True):
            assert_same(item, counterpart)
    else:
        assert repr(one) == repr(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_model_and_optimizer_come_back_bit_for_bit(tmp_path: Path, make_optimizer: Any, dtype: torch.dtype) -> None:
    model = build(1, dtype)
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer, None, range(3))
    path = save_checkpoint(tmp_path, 3, model, optimizer, loader_state={"position": 12}, progress={"skipped": 1})

    fresh = build(2, dtype)
    fresh_optimizer = make_optimizer(fresh.parameters())
    found = load_checkpoint(path, fresh, fresh_optimizer)
    assert (found.path, found.step, found.loader_state, found.progress) == (path, 3, {"position": 12}, {"skipped": 1})
    assert_same(fresh.state_dict(), model.state_dict())
    assert_same(fresh_optimizer.state_dict(), optimizer.state_dict())
    assert fresh.get_parameter("2.weight") is fresh.get_parameter("0.weight")

    train(model, optimizer, None, range(3, 6))
    train(fresh, fresh_optimizer, None, range(3, 6))
    assert_same(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_go_on_where_they_were(tmp_path: Path, make_scheduler: Any) -> None:
    runs = []
    for seed in (1, 2):
        model = build(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append((model, optimizer, make_scheduler(optimizer)))
    train(*runs[0], range(3))
    load_checkpoint(save_checkpoint(tmp_path, 3, *runs[0]), *runs[1])
    assert_same(runs[1][2].state_dict(), runs[0][2].state_dict())
    for run in runs:
        train(*run, range(3, 6))
    assert runs[1][2].get_last_lr() == runs[0][2].get_last_lr()
    assert_same(runs[1][0].state_dict(), runs[0][0].state_dict())


def test_infinity_in_a_scheduler_survives(tmp_path: Path) -> None:
    model = build(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, fresh = ReduceLROnPlateau(optimizer), ReduceLROnPlateau(optimizer, patience=99)
    load_checkpoint(save_checkpoint(tmp_path, 0, model, optimizer, scheduler), model, optimizer, fresh)
    assert fresh.state_dict() == scheduler.state_dict()
    assert fresh.best == float("inf")


CRASH = """
import os, sys, torch
from aioloader.training import save_checkpoint
from aioloader.training.checkpoints import files
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
save_checkpoint(sys.argv[1], 1, model, optimizer, loader_state="first")
files.publish = lambda *args: os._exit(9)
save_checkpoint(sys.argv[1], 2, model, optimizer, loader_state="second")
"""


def test_a_crash_while_saving_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], check=False)
    assert done.returncode == 9
    assert (tmp_path / ".step_00000002.partial" / ".metadata").is_file()
    latest = latest_checkpoint(tmp_path)
    assert latest == tmp_path / "step_00000001"
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert load_checkpoint(latest, model, optimizer).loader_state == "first"
    save_checkpoint(tmp_path, 3, model, optimizer, keep=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]


def test_our_own_files_are_json(tmp_path: Path) -> None:
    model = build(1)
    path = save_checkpoint(tmp_path, 1, model, torch.optim.AdamW(model.parameters()), loader_state={"a": 1})
    assert {entry.name for entry in path.glob("*.json")} == {"checkpoint.json", "training.json", "loader_dp00000.json"}
    assert json.loads((path / "training.json").read_text())["step"] == 1
    assert json.loads((path / "checkpoint.json").read_text())["files"].keys() == {entry.name for entry in path.iterdir()} - {
        "checkpoint.json"
    }


def saved(directory: Path) -> Path:
    model = build(1)
    return save_checkpoint(directory, 1, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_every_difference_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in model.parameters()], lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, T_max=3)
    with pytest.raises(ResumeError, match="Build the model, optimizer and scheduler as in the run that saved it") as caught:
        load_checkpoint(path, model, optimizer, scheduler)
    differences = {what: (found, present) for what, found, present in caught.value.differences}
    assert differences["model, 1.weight"] == ("float32[4]", "float32[4, 3]")
    assert differences["model, 1.running_mean"] == ("float32[4]", "nothing")
    assert differences["optimizer, parameters in each group"] == ([7], [1, 1, 1, 1])
    assert differences["scheduler"] == ("none", "CosineAnnealingLR")
    assert "model, 0.weight" not in differences
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_the_state_of_another_optimizer_or_scheduler_is_refused(tmp_path: Path) -> None:
    model = build(1)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    path = save_checkpoint(tmp_path, 1, model, adam, CosineAnnealingLR(adam, T_max=3))
    other = torch.optim.AdamW(model.parameters(), lr=0.2)
    with pytest.raises(ResumeError, match=r"optimizer: expected 'AdamW' .*, got 'Adam'.*\n.*expected 'MultiStepLR' .*, got 'Cosine"):
        load_checkpoint(path, model, other, MultiStepLR(other, [1]))
    assert other.param_groups[0]["lr"] == 0.2


def test_a_full_disk_is_told_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(500, 500)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ConfigError, match=r"checkpoint in .*: expected room for its tensors, got .* MiB are free\); free space there"):
            save_checkpoint(tmp_path, 1, model, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert latest_checkpoint(tmp_path) is None
    assert save_checkpoint(tmp_path, 1, model, None) == latest_checkpoint(tmp_path)


def test_another_dtype_is_a_difference(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = build(1, torch.bfloat16)
    with pytest.raises(ResumeError, match=r"model, 0\.bias: expected 'bfloat16\[4\]' \(this loader\), got 'float32\[4\]'"):
        load_checkpoint(path, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_half_written_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path)
    tensors = path / "__0_0.distcp"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    model = build(1)
    with pytest.raises(ConfigError, match="expected a complete checkpoint, got none, or one with missing or short files"):
        load_checkpoint(path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="expected a complete checkpoint, got no such directory"):
        load_checkpoint(tmp_path / "nowhere", model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    model = build(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        save_checkpoint(tmp_path, step, model, optimizer, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003", "step_00000004"]


@pytest.mark.parametrize(
    ("step", "keep", "message"),
    [(-1, 2, r"save_checkpoint\(step=\): expected 0 or more, got -1"), (1, 0, r"save_checkpoint\(keep=\): expected 1 or more, or None")],
)
def test_options_are_checked(tmp_path: Path, step: int, keep: int, message: str) -> None:
    model = build(1)
    with pytest.raises(ConfigError, match=message):
        save_checkpoint(tmp_path, step, model, torch.optim.SGD(model.parameters(), lr=0.1), keep=keep)


def test_a_state_that_needs_pickle_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = build(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(
        ConfigError, match=r"checkpoint, optimizer/param_groups/0/hook: expected tensors, .* got builtin_function_or_method"
    ):
        save_checkpoint(tmp_path, 1, model, optimizer)
    assert list(tmp_path.iterdir()) == []
