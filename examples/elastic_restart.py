"""Killed on 4 ranks, continued on 2: the same records in the same steps, the same losses and the same weights, bit for bit.

    python examples/elastic_restart.py --output .demo/elastic

Starts torchrun three times: a run of 10 steps on 4 ranks; one that is killed in step 8, after a checkpoint at step 5; and that one
again, on 2 ranks. Four lanes make the global batch the same on 1, 2 or 4 ranks. These differ in the order in which gradients are
added, which does not show where float32 gradients are added in float64.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS, SAVED_AT, KILLED_IN, LANES = 10, 5, 8, 4


def train(output: Path, log: Path, *, is_killed: bool) -> None:
    """Train on this rank, and log what each step was made of."""
    import torch

    from aioloader import Loader, Mesh, Pack, PretrainCollator, Shuffle, StepReport, Trainer

    torch.manual_seed(0)
    mesh = Mesh.from_env()
    model = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Tanh(), torch.nn.Linear(32, 256))
    records = [{"text": f"record {number} of many, {number * number} " * (1 + number % 9)} for number in range(3000)]
    loader = Loader(
        records,
        preprocess=lambda record: {"input_ids": list(record["text"].encode())},
        batch=Pack(256, strategy="best_fit"),
        collate=PretrainCollator(),
        shuffle=Shuffle(),
        lanes=LANES,
        mesh=mesh,
        workers=1,
    )

    def loss(model: torch.nn.Module, batch: Any) -> Any:
        targets = batch["labels"][:, 1:].flatten()
        logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()

    def report(step: StepReport) -> None:
        with log.with_suffix(f".rank{mesh.dp_rank}").open("a") as file:
            weights = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())).hexdigest()
            print(json.dumps({"step": step.step, "loss": step.loss, "weights": weights, "records": step.records}), file=file)
        if is_killed and step.step == KILLED_IN - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"checkpoint_dir": output, "checkpoint_every": SAVED_AT, "loss_fn": loss, "on_step": report}
    Trainer(model, loader, optimizer, mesh=mesh, max_steps=STEPS, accumulate_dtype=torch.float64, **options).train()


def launch(num_ranks: int, output: Path, name: str, *options: str) -> list[dict[str, Any]]:
    """Run this script on some ranks and return what was logged: for each step the loss, the weights and all records, by lane."""
    log = output / name
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), __file__]
    command += ["--output", str(output / name.split("-")[0]), "--write-to", str(log), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "--killed" not in options:
        raise SystemExit(done.stderr)
    ranks = [[json.loads(line) for line in Path(f"{log}.rank{rank}").read_text().splitlines()] for rank in range(num_ranks)]
    # A rank serves the lanes rank, rank + num_ranks, ... in this order.
    return [
        {
            **{name: steps[0][name] for name in ("loss", "weights")},
            "records": [steps[lane % num_ranks]["records"][lane // num_ranks] for lane in range(LANES)],
        }
        for steps in zip(*ranks, strict=True)
    ]


def main() -> None:
    """Start the runs and compare them; with --write-to: be one rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a new folder for checkpoints and logs")
    parser.add_argument("--write-to", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--killed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write_to:
        train(args.output, args.write_to, is_killed=args.killed)
        return
    args.output.mkdir(parents=True)
    whole = launch(4, args.output, "whole")
    before = launch(4, args.output, "run-4", "--killed")
    after = launch(2, args.output, "run-2")
    joined = before[:SAVED_AT] + after
    first, last = joined[0]["loss"], joined[-1]["loss"]
    print(f"4 ranks, {len(before)} steps and a kill; 2 ranks from step {SAVED_AT}; losses {first:.3f} -> {last:.3f}")
    found = {name: [one[name] for one in joined] == [one[name] for one in whole] for name in ("records", "loss", "weights")}
    verdict = ", ".join(f"{name} {'equal' if is_equal else 'DIFFERENT'}" for name, is_equal in found.items())
    print(f"elastic restart, {len(whole)} steps, bit for bit: {verdict}")
    sys.exit(0 if all(found.values()) else 1)


if __name__ == "__main__":
    main()
