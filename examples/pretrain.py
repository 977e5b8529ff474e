"""Pretrain a small Llama on the source of Python's standard library, data-parallel, with checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/pretrain.py --tokenizer .demo/tokenizer.json --output .demo/mine

Start it again after a crash, with the same arguments, and it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformers import LlamaConfig, LlamaForCausalLM

from aioloader import Loader, Mesh, Pack, PretrainCollator, StepReport, TextFiles, Trainer
from stdlib_corpus import Tokenize, stdlib_files

SHAPE = LlamaConfig(
    vocab_size=8192,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    tie_word_embeddings=True,
)


def main() -> None:
    """Train on this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder for checkpoints and logs")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    mesh = Mesh.from_env()
    loader = Loader(
        TextFiles(stdlib_files(), errors="replace"),
        preprocess=Tokenize(args.tokenizer),
        batch=Pack(256, rows=2, overflow="truncate"),
        collate=PretrainCollator(),
        mesh=mesh,
        epochs=None,
        workers=1,
        buffer_size=16,
    )
    args.output.mkdir(parents=True, exist_ok=True)
    columns = (MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"))
    with (args.output / f"rank{mesh.dp_rank}.jsonl").open("a") as log, Progress(*columns, disable=mesh.dp_rank > 0) as progress:
        bar = progress.add_task("starting", total=args.steps)

        def report(step: StepReport) -> None:
            speed, waiting = step.num_tokens / step.step_time_s, step.data_wait_s / step.step_time_s
            text = f"loss {step.loss:.3f}, {speed:,.0f} tokens/s, {waiting:.1%} waiting for data"
            progress.update(bar, completed=step.step, description=text)
            facts = {"step": step.step, "loss": step.loss.hex(), "records": step.records, "seconds": step.step_time_s}
            print(json.dumps(facts), file=log, flush=True)

        Trainer(
            model,
            loader,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            mesh=mesh,
            max_steps=args.steps,
            checkpoint_dir=args.output / "checkpoints",
            checkpoint_every=20,
            on_step=report,
        ).train()


if __name__ == "__main__":
    main()
