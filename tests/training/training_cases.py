"""What test_run.py looks at: runs of real ranks. Run as `python -m tests.training.training_cases results.json`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aioloader.errors import AioLoaderError
from aioloader.order.mesh import Mesh
from aioloader.training import StepReport, Trainer, latest_checkpoint, save_checkpoint
from aioloader.training.loss import causal_lm_loss
from tests.training.fake_loader import FakeBatch, FakeLoader, TinyModel, language_batches
from tests.training.ranks import Store, run_ranks

LANES = 4
NUM_STEPS = 10


def train(
    rank: int,
    size: int,
    *,
    batches: list[FakeBatch] | None = None,
    fails_at: int | None = None,
    bad_state_at: int | None = None,
    seed: int = 3,
    **options: Any,
) -> Any:
    """Train the tiny model and return all there is to compare."""
    model = TinyModel(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    mesh = Mesh(dp_rank=rank, dp_size=size)
    loader = FakeLoader(batches or language_batches(60), LANES, mesh, fails_at=fails_at, bad_state_at=bad_state_at)
    reports: list[StepReport] = []
    hook = options.pop("on_step", reports.append)
    options = {"max_steps": NUM_STEPS, "max_grad_norm": 1.0, "scheduler": scheduler, "on_step": hook, "timeout_s": 20.0, **options}
    found: dict[str, Any] = {"error": None, "result": None}
    try:
        result = Trainer(model, loader, optimizer, **options).train()
        found["result"] = {"step": result.step, "num_steps": result.num_steps, "stopped_by": result.stopped_by}
    except (AioLoaderError, OSError) as error:
        found["error"] = [type(error).__name__, str(error), list(getattr(error, "missing", []))]
    return found | {
        "parameters": {name: value.tolist() for name, value in model.state_dict().items()},
        "has_gradients": any(parameter.grad is not None for parameter in model.parameters()),
        "num_closed": loader.num_closed,
        "reports": [
            [report.step, report.loss, report.grad_norm, report.lr, report.num_tokens, report.num_targets, report.skipped]
            for report in reports
        ],
        "records": [[list(record) for batch in report.records for record in batch] for report in reports],
        "times_fit": all(0 <= report.data_wait_s <= report.work_s <= report.step_time_s for report in reports),
        "evaluations": [[report.step, report.evaluation.loss, report.evaluation.num_batches] for report in reports if report.evaluation],
        "ranks": [[report.step, [row.dp_rank for row in report.ranks.rows], slow(report)] for report in reports if report.ranks],
        "padding": [report.num_padding for report in reports],
        "losses": [len(report.losses) for report in reports],
    }


def slow(report: StepReport) -> list[int]:
    assert report.ranks is not None
    return [row.dp_rank for row in report.ranks.stragglers]


def one_rank(rank: int, store: Store) -> Any:
    return train(0, 1)


def two_ranks(rank: int, store: Store) -> Any:
    return train(rank, 2, seed=3 + rank)  # rank 1 starts elsewhere and must take over the parameters of rank 0


def first_half(directory: str, rank: int, store: Store) -> Any:
    return train(rank, 2, max_steps=5, checkpoint_dir=directory, checkpoint_every=2)


def second_half(directory: str, rank: int, store: Store) -> Any:
    return train(rank, 2, seed=99, checkpoint_dir=directory)


def other_size(directory: str, rank: int, store: Store) -> Any:
    return train(rank, 1, checkpoint_dir=directory)


def uneven(directory: str, rank: int, store: Store) -> Any:
    """Rank 0 has three steps of batches, rank 1 two and a half."""
    return train(rank, 2, batches=language_batches(11), checkpoint_dir=directory)


def sigterm(directory: str, rank: int, store: Store) -> Any:
    """Only rank 1 gets the signal, in step 3."""

    def on_step(report: StepReport) -> None:
        if rank == 1 and report.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    found = train(rank, 2, checkpoint_dir=directory, on_step=on_step)
    return found | {"handler_restored": signal.getsignal(signal.SIGTERM) == before}


def failing_upstream(rank: int, store: Store) -> Any:
    """The loader of rank 1 fails in step 2; rank 1 ends, and with it its connections."""
    found = train(rank, 2, fails_at=5)
    if rank == 1:
        dist.destroy_process_group()
    return found


def failing_model(rank: int, store: Store) -> Any:
    """The model of rank 1 fails in the last micro-batch of step 2, while the gradients of rank 0 may be on their way."""
    num_calls = 0

    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        nonlocal num_calls
        num_calls += 1
        if rank == 1 and num_calls == 4:
            raise ArithmeticError("in the model")
        return causal_lm_loss(model, batch)

    started = time.perf_counter()
    try:
        found = train(rank, 2, loss_fn=loss_fn)
    except ArithmeticError as error:
        found = {"error": [type(error).__name__, str(error), []]}
    return found | {"seconds": time.perf_counter() - started}


def observed(rank: int, store: Store) -> Any:
    """Rank 1 is slow, and has two batches to evaluate where rank 0 has three; all else is as in `two_ranks`."""

    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if rank == 1 and model.training:
            time.sleep(0.05)  # heavy work
        return causal_lm_loss(model, batch)

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("aioloader").addHandler(handler)
    eval_loader = FakeLoader(language_batches(65)[60:], 2, Mesh(dp_rank=rank, dp_size=2))
    found = train(rank, 2, seed=3 + rank, loss_fn=loss_fn, eval_loader=eval_loader, eval_every=5, rank_table_every=4)
    return found | {"warnings": warnings}


def failing_evaluation(rank: int, store: Store) -> Any:
    """The second batch of rank 1 fails."""
    eval_loader = FakeLoader(language_batches(65)[60:], 2, Mesh(dp_rank=rank, dp_size=2), fails_at=3)
    return train(rank, 2, eval_loader=eval_loader, eval_every=1)


def background_half(directory: str, rank: int, store: Store) -> Any:
    return train(rank, 2, seed=3 + rank, max_steps=5, checkpoint_dir=directory, checkpoint_every=2, checkpoint_async=True)


def failing_background(directory: str, rank: int, store: Store) -> Any:
    """The state of rank 1 after step 2 is not JSON."""
    return train(rank, 2, bad_state_at=7, checkpoint_dir=directory, checkpoint_every=1, checkpoint_async=True)


class Scalar(nn.Module):
    """One parameter, zero, whose gradient is the loss sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))


def given_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    weight = model.get_parameter("weight")
    return (weight - weight.detach() + 1) * batch["loss"], batch["targets"]


def token_weighted(rank: int, store: Store) -> Any:
    """Train one step on the same samples, cut in several ways into ranks and micro-batches of (loss sum, targets)."""
    found = []
    for cut in (
        [[(20, 10), (2, 2)], [(3, 1), (7, 7)]],
        [[(20, 10), (7, 7)], [(3, 1), (2, 2)]],
        [[(22, 12)], [(10, 8)]],
        [[(29, 19), (0, 0)], [(2, 1), (1, 0)]],
    ):
        mesh, lanes = Mesh(dp_rank=rank, dp_size=2), 2 * len(cut[0])
        pairs = [cut[index % 2][index // 2] for index in range(lanes)]
        batches = [FakeBatch({"loss": torch.tensor(float(a)), "targets": torch.tensor(b)}, index=i) for i, (a, b) in enumerate(pairs)]
        model, reports = Scalar(), list[StepReport]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = FakeLoader(batches, lanes, mesh)
        Trainer(model, loader, optimizer, max_steps=1, mesh=mesh, loss_fn=given_loss, on_step=reports.append).train()
        found.append([reports[0].loss, -model.weight.item(), reports[0].num_targets])
    return found


def failing_save(directory: str, rank: int, store: Store) -> Any:
    """Rank 1 has a loader state that JSON would change."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_checkpoint(directory, 1, model, optimizer, loader_state={"rank": rank})
    try:
        save_checkpoint(directory, 2, model, optimizer, loader_state={"rank": [rank] if rank == 0 else (rank,)})
    except AioLoaderError as error:
        failure = [type(error).__name__, str(error), list(getattr(error, "missing", []))]
    latest = latest_checkpoint(directory)
    third = save_checkpoint(directory, 3, model, optimizer, loader_state={"rank": rank})
    states = [json.loads((third / f"loader_dp0000{number}.json").read_text()) for number in range(2)]
    names = sorted(path.name for path in Path(directory).iterdir())
    return {"failure": failure, "latest": latest and latest.name, "states": states, "names": names}


def main(path: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        results: dict[str, Any] = {
            "one_rank": run_ranks(1, one_rank),
            "two_ranks": run_ranks(2, two_ranks),
            "first_half": run_ranks(2, lambda rank, store: first_half(f"{root}/halves", rank, store)),
            "names": sorted(entry.name for entry in Path(root, "halves").iterdir()),
        }
        Path(root, "halves/.step_00000009.partial").mkdir()
        Path(root, "halves/step_00000010").mkdir()
        results |= {
            "other_size": run_ranks(1, lambda rank, store: other_size(f"{root}/halves", rank, store)),
            "second_half": run_ranks(2, lambda rank, store: second_half(f"{root}/halves", rank, store)),
            "uneven": run_ranks(2, lambda rank, store: uneven(f"{root}/uneven", rank, store)),
            "uneven_names": sorted(entry.name for entry in Path(root, "uneven").iterdir()),
            "sigterm": run_ranks(2, lambda rank, store: sigterm(f"{root}/sigterm", rank, store)),
            "sigterm_names": sorted(entry.name for entry in Path(root, "sigterm").iterdir()),
            "failing_upstream": run_ranks(2, failing_upstream),
            "token_weighted": run_ranks(2, token_weighted),
            "failing_model": run_ranks(2, failing_model),
            "observed": run_ranks(2, observed),
            "failing_evaluation": run_ranks(2, failing_evaluation),
            "background_half": run_ranks(2, lambda rank, store: background_half(f"{root}/background", rank, store)),
            "background_names": sorted(entry.name for entry in Path(root, "background").iterdir()),
            "background_resumed": run_ranks(2, lambda rank, store: second_half(f"{root}/background", rank, store)),
            "failing_background": run_ranks(2, lambda rank, store: failing_background(f"{root}/unsaved", rank, store)),
            "unsaved_names": sorted(entry.name for entry in Path(root, "unsaved").iterdir()),
            "failing_save": run_ranks(2, lambda rank, store: failing_save(f"{root}/failing", rank, store)),
        }
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
