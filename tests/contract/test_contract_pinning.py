"""Page-locked batches: asked for on a machine without CUDA they are an ordinary run and a log line; with it, they are pinned."""

from __future__ import annotations

import logging

import pytest
import torch

from aioloader import FixedBatch, Loader, StackCollator
from tests.contract.cases import PROCESSES, THREAD_HOST, Options, name_of


def square(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((100,), number * number)}


@pytest.mark.parametrize("options", [PROCESSES, THREAD_HOST], ids=name_of)
def test_batches_are_pinned_where_that_is_possible(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "aioloader")
    with Loader(range(40), preprocess=square, batch=FixedBatch(4), collate=StackCollator(), pin_memory=True, **options) as loader:
        batches = list(loader)
    assert [batch["x"][:, 0].tolist() for batch in batches] == [[n * n for n in range(at, at + 4)] for at in range(0, 40, 4)]
    if torch.cuda.is_available():
        assert all(batch["x"].is_pinned() for batch in batches)
    else:
        assert "pin_memory=True: expected a CUDA device, got none" in caplog.text
