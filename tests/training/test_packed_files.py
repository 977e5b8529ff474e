"""From packed rows on the disk to a loss: dataset, sampler, collator, micro-batches, model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from aioloader import DistributedDataLoader, DistributedSampler, Mesh, PackedDataset, PretrainCollator, StepReport, Trainer
from tests.tokens.token_cases import write_tokens
from tests.training.equivalence_table import VOCABULARY, CausalModel, loss


def test_rows_of_a_packed_file_train_a_model_in_the_order_of_the_sampler(tmp_path: Path) -> None:
    """C002."""
    rows = (np.arange(90)[:, None] + 3 * np.arange(24)) % VOCABULARY
    write_tokens("npy", tmp_path / "packed.npy", rows, dtype="uint16", seq_len=24)
    dataset, mesh = PackedDataset(tmp_path / "packed.npy"), Mesh()
    sampler = DistributedSampler(len(dataset), mesh, seed=5)
    loader = DistributedDataLoader(dataset, mesh, 4, collator=PretrainCollator(), sampler=sampler, lanes=2)
    model, reports = CausalModel(), list[StepReport]()
    Trainer(model, loader, torch.optim.AdamW(model.parameters(), lr=0.01), max_steps=11, loss_fn=loss, on_step=reports.append).train()
    trained = [row for report in reports for micro_batch in report.records for _, row in micro_batch]
    assert sorted(trained) == sorted(list(sampler)[:88])
    assert trained[:8:2] + trained[1:8:2] != trained[:8]
    assert {report.num_targets for report in reports} == {8 * 23}
    assert reports[-1].loss < 0.8 * reports[0].loss
