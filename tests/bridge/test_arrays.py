"""Batches of NumPy arrays are those of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aioloader import FixedBatch
from aioloader.loader import ArrayLoader, Loader


def collate(samples: list[int]) -> dict[str, object]:
    return {
        "row": np.array(samples, np.uint16),
        "image": np.full((len(samples), 3, 100), samples[0], np.float32),
        "none": np.zeros((0, 2)),
        "text": [str(sample) for sample in samples],
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_as_those_of_tensors(workers: int) -> None:
    with Loader(range(21), batch=FixedBatch(3), collate=collate, workers=workers) as loader:
        expected = [({**batch}, batch.samples, batch.state()) for batch in loader]
    with ArrayLoader(range(21), batch=FixedBatch(3), collate=collate, workers=workers) as loader:
        found = list(loader)
    assert len(found) == len(expected) == 7
    for batch, (fields, samples, state) in zip(found, expected, strict=True):
        assert list(batch) == list(fields)
        assert batch.samples == samples
        assert {**batch.state(), "source": None} == {**state, "source": None}, "where reading began is up to the clock"
        for name, value in fields.items():
            if isinstance(value, torch.Tensor):
                assert isinstance(batch[name], np.ndarray)
                assert torch.equal(torch.from_numpy(batch[name]), value)
            else:
                assert batch[name] == value
    assert "row: uint16[3]" in repr(found[0])
