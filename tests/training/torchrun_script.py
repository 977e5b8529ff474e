"""A training script as a user would start it with torchrun; argument: a directory for results. Rank 1 gets SIGTERM in step 3."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aioloader.order.mesh import Mesh
from aioloader.training import StepReport, Trainer
from tests.training.fake_loader import FakeLoader, TinyModel, language_batches


def main(directory: str) -> None:
    mesh = Mesh.from_env()
    model = TinyModel(seed=mesh.dp_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = FakeLoader(language_batches(400), 4, mesh)

    def on_step(report: StepReport) -> None:
        if report.step == 3 and mesh.dp_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    options = {"checkpoint_dir": f"{directory}/checkpoints", "checkpoint_async": True, "on_step": on_step}
    result = Trainer(model, loader, optimizer, max_steps=100, **options).train()  # type: ignore[arg-type]
    found = {
        "step": result.step,
        "stopped_by": result.stopped_by,
        "dp_size": mesh.dp_size,
        "checkpoint": result.checkpoint and result.checkpoint.name,
        "parameters": {name: value.tolist() for name, value in model.state_dict().items()},
        "group_left": dist.is_initialized(),
    }
    Path(directory, f"rank{mesh.dp_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
