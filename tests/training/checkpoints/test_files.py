"""Checkpoint files: published by one rename, believed only when complete, cleaned up by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from aioloader.errors import ConfigError
from aioloader.training.checkpoints import files


def make(directory: Path, step: int, *, dp_size: int = 2) -> Path:
    path = files.prepare(directory, step)
    for rank in range(dp_size):
        files.write_json(path / files.loader_file(rank), {"rank": rank})
    (path / "tensors").write_bytes(b"0123456789")
    return files.publish(directory, step, dp_size)


def test_a_checkpoint_appears_when_published(tmp_path: Path) -> None:
    path = files.prepare(tmp_path, 3)
    assert path == tmp_path / ".step_00000003.partial"
    for rank in range(2):
        files.write_json(path / files.loader_file(rank), None)
    assert files.latest_checkpoint(tmp_path) is None
    assert files.publish(tmp_path, 3, 2) == tmp_path / "step_00000003"
    assert files.latest_checkpoint(tmp_path) == tmp_path / "step_00000003"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000003"]


def test_the_latest_is_the_highest_step_not_the_last_written(tmp_path: Path) -> None:
    for step in (9, 100_000_000, 10):
        make(tmp_path, step)
    assert [step for step, _ in files.complete_checkpoints(tmp_path)] == [9, 10, 100_000_000]
    assert files.latest_checkpoint(tmp_path) == tmp_path / "step_100000000"


def damage_nothing_written(path: Path) -> None:
    for entry in path.iterdir():
        entry.unlink()


def damage_short_file(path: Path) -> None:
    (path / "tensors").write_bytes(b"012345678")


def damage_missing_file(path: Path) -> None:
    (path / "loader_dp00001.json").unlink()


def damage_no_manifest(path: Path) -> None:
    (path / files.MANIFEST).unlink()


def damage_cut_manifest(path: Path) -> None:
    manifest = path / files.MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-5])


def damage_other_version(path: Path) -> None:
    files.write_json(path / files.MANIFEST, {**files.read_json(path / files.MANIFEST), "version": 99})


@pytest.mark.parametrize(
    "damage",
    [damage_nothing_written, damage_short_file, damage_missing_file, damage_no_manifest, damage_cut_manifest, damage_other_version],
)
def test_an_incomplete_checkpoint_is_passed_over(tmp_path: Path, damage: Any) -> None:
    complete = make(tmp_path, 1)
    broken = make(tmp_path, 2)
    assert files.latest_checkpoint(tmp_path) == broken
    damage(broken)
    assert files.read_manifest(broken) is None
    assert files.latest_checkpoint(tmp_path) == complete


def test_preparing_clears_what_crashed_saves_left_and_nothing_else(tmp_path: Path) -> None:
    for name in (".step_00000001.partial", ".step_00000002.replaced", ".step_1.partial", "step_00000009", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    files.prepare(tmp_path, 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".step_00000002.partial", ".step_1.partial", "mine", "step_00000009"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    make(tmp_path, 5, dp_size=1)
    make(tmp_path, 5, dp_size=2)
    manifest = files.read_manifest(tmp_path / "step_00000005")
    assert manifest is not None
    assert manifest["dp_size"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000005"]


def test_older_checkpoints_are_removed_and_later_ones_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 50):
        make(tmp_path, step)
    files.remove_older(tmp_path, 4, 2)
    assert [step for step, _ in files.complete_checkpoints(tmp_path)] == [3, 4, 50]


def test_a_directory_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    files.write_json(files.prepare(tmp_path, 1) / files.loader_file(0), None)
    with pytest.raises(ConfigError, match=r"expected a directory that all ranks share, got no loader_dp00001\.json in it"):
        files.publish(tmp_path, 1, 2)
    assert files.latest_checkpoint(tmp_path) is None


def test_a_directory_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    assert files.complete_checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, {"a": [(1,)]}, {1, 2}, object(), b"bytes"])
def test_what_json_changes_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint, state\.json: expected data that JSON keeps unchanged"):
        files.write_json(tmp_path / "state.json", value)
    assert not (tmp_path / "state.json").exists()


def test_what_json_keeps_comes_back_equal(tmp_path: Path) -> None:
    value = {"a": [1, 0.1, -1e-300, math.inf, None, True, "ü"], "b": {"c": 2**70}}
    files.write_json(tmp_path / "state.json", value)
    assert files.read_json(tmp_path / "state.json") == value
