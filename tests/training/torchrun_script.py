"""A training script as a user would start it with torchrun; argument: a directory for results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aioloader.order.mesh import Mesh
from aioloader.training import Trainer
from tests.training.fake_loader import FakeLoader, TinyModel, language_batches


def main(directory: str) -> None:
    mesh = Mesh.from_env()
    model = TinyModel(seed=mesh.dp_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = FakeLoader(language_batches(20), 4, mesh)
    result = Trainer(model, loader, optimizer, max_steps=3, checkpoint_dir=f"{directory}/checkpoints").train()
    found = {
        "step": result.step,
        "dp_size": mesh.dp_size,
        "checkpoint": result.checkpoint and result.checkpoint.name,
        "parameters": {name: value.tolist() for name, value in model.state_dict().items()},
        "group_left": dist.is_initialized(),
    }
    Path(directory, f"rank{mesh.dp_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
