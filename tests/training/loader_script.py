"""A training script with the real loader, as a user would start it, alone or with torchrun; argument: a directory for results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from aioloader import Loader, Mesh, Pack, PretrainCollator, StepReport, Trainer
from tests.training.fake_loader import VOCABULARY, TinyModel

NUM_RECORDS = 80


def tokenize(number: int) -> dict[str, Any]:
    """Return 8, 16 or 24 tokens: rows of 16 come out even in each lane, with different numbers of targets."""
    return {"input_ids": [(number * 7 + place) % VOCABULARY for place in range((8, 16, 24, 16)[number // 4 % 4])]}


def main(directory: str) -> None:
    mesh = Mesh.from_env()
    model = TinyModel()
    loader = Loader(
        range(NUM_RECORDS), preprocess=tokenize, batch=Pack(16, rows=1), collate=PretrainCollator(), lanes=4, workers=1, epochs=1, mesh=mesh
    )
    steps: list[StepReport] = []
    Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, max_steps=1000, on_step=steps.append).train()
    found = {
        "num_steps": len(steps),
        "losses": [step.loss for step in steps],
        "records": [[row for micro_batch in step.records for _, row in micro_batch] for step in steps],
        "parameters": {name: value.tolist() for name, value in model.state_dict().items()},
    }
    Path(directory, f"of{mesh.dp_size}rank{mesh.dp_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
