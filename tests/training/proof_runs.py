"""The runs of the proof of value: ten steps uninterrupted, killed in the middle of step 8, and resumed from step 5 by fresh processes.

    python -m tests.training.proof_runs begin directory      uninterrupted runs, and those that are killed
    python -m tests.training.proof_runs resume directory     those that were killed again, in another interpreter

Each rank is a process of its own, forked from an interpreter that has imported torch, and logs a line for each step.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aioloader import Loader, Mesh, StepReport, Trainer
from stdlib_corpus import train_tokenizer
from tests.training.proof_cases import CASES, VOCABULARY, Options
from tests.training.proof_work import small_modules, write_data

NUM_STEPS, SAVED_AT, KILLED_IN, NUM_LANES = 10, 5, 8, 2
LIMIT_S = 60.0

UNINTERRUPTED = {"workers": 1, "buffer_size": 16}
KILLED = {"workers": 2, "buffer_size": 64}
RESUMED = {"workers": 1, "buffer_size": 5}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run: `train` is called on each rank; `loading` is how the loader works, which must not matter to what it delivers."""

    train: Callable[[Run], None]
    case: str
    name: str
    loading: Options
    num_ranks: int = 1
    checkpoints: str = "checkpoints"

    @property
    def is_killed(self) -> bool:
        return self.name.startswith("killed")


class Run:
    """One rank of a run, in its process."""

    def __init__(self, job: Job, rank: int, root: Path, killer: Connection) -> None:
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)
        self.job, self.root, self.killer = job, root, killer
        self.case = CASES[job.case]
        self.log = root / f"{job.case}.{job.name}.rank{rank}.jsonl"
        self.mesh = Mesh(dp_rank=rank, dp_size=job.num_ranks)
        self.model = self.case.model()
        self.optimizer = self.case.optimizer(self.model.parameters())
        self.loader = Loader(mesh=self.mesh, lanes=NUM_LANES, epochs=None, seed=5, **self.case.data(root), **job.loading)
        self.batches: list[Options] = []

    def train(self, **options: Any) -> None:
        """Train up to step 10."""
        options = {"mesh": self.mesh, "loss_fn": self.loss, "timeout_s": LIMIT_S, "on_step": self.report, **options}
        Trainer(self.model, self.loader, self.optimizer, max_steps=NUM_STEPS, **options).train()
        self.write({"parameters": digest(*(value.numpy().tobytes() for value in self.model.state_dict().values()))})

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss of a micro-batch once it is noted; one that is to be killed waits for that before the last of step 8."""
        self.batches.append(describe(batch))
        if self.job.is_killed and len(self.batches) == KILLED_IN * NUM_LANES // self.mesh.dp_size:
            self.killer.send(None)
            signal.pause()
        return self.case.loss(model, batch)

    def report(self, report: StepReport) -> None:
        batches = self.batches[-len(report.records) :]
        self.write({"step": report.step, "loss": report.loss.hex(), "records": report.records, "batches": batches})

    def write(self, facts: Mapping[str, Any]) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def describe(batch: Any) -> Options:
    """Return what tells micro-batches apart: all their bits, those of each row, the shape, and the pieces of packed documents."""
    arrays = {name: value.numpy() for name, value in sorted(batch.items()) if isinstance(value, Tensor)}
    rows = arrays["input_ids" if "input_ids" in arrays else "image"]
    return {
        "digest": digest(*(name.encode() + array.tobytes() for name, array in arrays.items())),
        "rows": [digest(row.tobytes()) for row in rows],
        "shape": list(rows.shape),
        "num_pieces": len(arrays["cu_seqlens"]) - 1 if "cu_seqlens" in arrays else len(rows),
    }


def digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def undisturbed(run: Run) -> None:
    run.train()


def with_checkpoints(run: Run) -> None:
    """Train with the checkpoints of `Trainer`, from the latest on if there is one."""
    run.train(checkpoint_dir=run.root / f"{run.job.case}.{run.job.checkpoints}", checkpoint_every=SAVED_AT)


def on_two_ranks(run: Run) -> None:
    store = dist.FileStore(str(run.root / "store"), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=run.mesh.dp_rank, world_size=2)
    with_checkpoints(run)


BEGIN = [
    *(Job(train=undisturbed, case=case, name="uninterrupted", loading=UNINTERRUPTED) for case in CASES),
    *(Job(train=with_checkpoints, case=case, name="killed", loading=KILLED) for case in CASES),
    Job(train=on_two_ranks, case="packed_text", name="killed_on_two_ranks", loading=KILLED, num_ranks=2, checkpoints="of_two_ranks"),
]
RESUME = [
    *(Job(train=with_checkpoints, case=case, name="resumed", loading=RESUMED) for case in CASES),
    Job(train=with_checkpoints, case="packed_text", name="resumed_on_one_rank", loading=RESUMED, checkpoints="of_two_ranks"),
]


def carry_out(job: Job, root: Path) -> None:
    """Run the ranks of a job until they end; those that are to be killed are, once all of them are in step 8."""
    context = multiprocessing.get_context("fork")
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(job.num_ranks):
            receiving, sending = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_rank, args=(job, rank, root, sending), name=f"{job.case}, {job.name}, rank {rank}"
            )
            process.start()
            sending.close()
            ranks.append((process, receiving))
        if job.is_killed:
            for process, receiving in ranks:
                assert receiving.poll(LIMIT_S), f"{process.name} did not come to step {KILLED_IN}"
                receiving.recv()
            for process, _ in ranks:
                process.kill()
        for process, _ in ranks:
            process.join(LIMIT_S)
            assert process.exitcode == (-signal.SIGKILL if job.is_killed else 0), f"{process.name} ended with {process.exitcode}"
    finally:
        for process, receiving in ranks:
            process.kill()
            process.join()
            receiving.close()


def _rank(job: Job, rank: int, root: Path, killer: Connection) -> None:
    job.train(Run(job, rank, root, killer))


def main(stage: str, directory: str) -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # loads here, once, what every run would load for its first optimizer
    root = Path(directory)
    if stage == "begin":
        train_tokenizer(small_modules(), vocab_size=VOCABULARY, save_to=root / "tokenizer.json")
        write_data(root)
    for job in BEGIN if stage == "begin" else RESUME:
        carry_out(job, root)


if __name__ == "__main__":
    main(*sys.argv[1:])
