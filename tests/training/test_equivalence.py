"""A corner of `equivalence_table`: a global batch cut into micro-batches, and into two ranks, trains like one micro-batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.equivalence_table import CUTS, Cell, compare, run
from tests.training.ranks import run_cases

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases("tests.training.test_equivalence", tmp_path_factory.mktemp("equivalence"))


def test_gradients_and_parameters_agree_to_a_millionth(differences: dict[str, Any]) -> None:
    assert 0 < differences["fp32"]["gradients"] < 1e-6
    assert 0 < differences["fp32"]["parameters"] < 1e-6


@pytest.mark.parametrize("cut", ["4 x 2", "2 x 4"])
def test_accumulation_changes_neither_gradients_nor_losses(differences: dict[str, Any], cut: str) -> None:
    """C060: on one rank, against one micro-batch of 8."""
    assert 0 < differences[cut]["gradients"] < 1e-6
    assert max(differences[cut]["parameters"], differences[cut]["worst loss"]) < 1e-6


def test_the_loss_in_bfloat16_agrees_to_a_hundred_thousandth(differences: dict[str, Any]) -> None:
    assert differences["bf16"]["worst loss"] < 1e-5
    assert 0 < differences["bf16"]["parameters"] < 1e-2


def main(path: str) -> None:
    found = {}
    for name, is_bf16 in (("fp32", False), ("bf16", True)):
        cell = Cell(micro_batch=4, accumulation=2, dp_size=2, is_bf16=is_bf16)
        found[name] = compare(cell, run(cell.reference))
    alone = run(Cell(micro_batch=8, accumulation=1, dp_size=1))
    for rows, accumulation in CUTS[1:]:
        found[f"{rows} x {accumulation}"] = compare(Cell(micro_batch=rows, accumulation=accumulation, dp_size=1), alone)
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
