"""The TensorBoard log: read back by TensorBoard itself where it is installed, and a clear error where it is not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from aioloader.errors import ConfigError
from aioloader.training.tensorboard import TensorBoardLogger
from tests.training.test_averages import report

needs_tensorboard = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_without_tensorboard_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"TensorBoardLogger: expected the package tensorboard, got .*; pip install tensorboard, or log"):
        TensorBoardLogger(tmp_path)


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    accumulator: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@needs_tensorboard
@quiet
def test_a_resumed_run_hides_the_steps_that_it_does_again(tmp_path: Path) -> None:
    for steps, loss in ((range(1, 8), 2.0), (range(5, 9), 3.0)):
        with TensorBoardLogger(tmp_path, every=2) as board:
            for step in steps:
                board(report(step, loss=loss))
    assert scalars(tmp_path, "train/loss") == [(2, 2.0), (4, 2.0), (6, 3.0), (8, 3.0)]


@needs_tensorboard
@quiet
def test_other_ranks_write_no_file(tmp_path: Path) -> None:
    with TensorBoardLogger(tmp_path, every=1) as board:
        board(report(1, dp_rank=1))
    assert list(tmp_path.iterdir()) == []
