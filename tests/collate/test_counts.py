from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from aioloader.collate import TokenCounts, count_tokens

BATCHES: list[tuple[dict[str, Any], TokenCounts]] = [
    ({"attention_mask": [[1, 1, 0], [1, 0, 0]], "labels": [[-100, 5, -100], [-100, -100, -100]]}, TokenCounts(3, 3, 1)),
    ({"document_ids": [[0, 0, 1, -1]], "labels": [[-100, 2, -100, -100]]}, TokenCounts(3, 1, 1)),
    ({"input_ids": [[0, 0], [1, 2]]}, TokenCounts(4, 0, 0)),
    ({"attention_mask": [[1, 0]], "document_ids": [[0, 0]], "input_ids": [[1, 2]]}, TokenCounts(1, 1, 0)),
    ({"pixels": [[0.5]], "labels": [3]}, TokenCounts(0, 0, 1)),
    ({}, TokenCounts(0, 0, 0)),
]


@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["lists", "arrays", "tensors"])
@pytest.mark.parametrize(("batch", "counts"), BATCHES)
def test_counts_by_the_first_field_that_tells(batch: dict[str, Any], counts: TokenCounts, make: Any) -> None:
    found = count_tokens({name: make(values) for name, values in batch.items()})
    assert found == counts
    assert all(type(count) is int for count in found)


def test_boolean_masks_count() -> None:
    assert count_tokens({"attention_mask": torch.tensor([True, False])}) == (1, 1, 0)


def test_another_ignore_index() -> None:
    assert count_tokens({"labels": np.array([-1, -100, 3])}, ignore_index=-1).num_targets == 2


def test_collating_and_batching_need_no_torch() -> None:
    code = "import sys, aioloader.batching, aioloader.collate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
