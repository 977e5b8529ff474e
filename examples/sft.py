"""Fine-tune a small Llama on a stream of chats, data parallel: only what the assistant says is trained, equal lengths share a batch.

    torchrun --standalone --nproc-per-node 2 examples/sft.py

The chats are sums, written to a JSONL file first; Hugging Face `datasets` streams them, as it would from the Hub.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aioloader import Bucket, Loader, Mesh, SftCollator, Shuffle, StepReport, Trainer

SPECIAL = {"user": 256, "assistant": 257, "end": 258, "pad": 259}
SHAPE = LlamaConfig(
    vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=SPECIAL["pad"]
)


def write_chats(path: Path, number: int) -> None:
    """Write dialogues of one to three turns, the same ones whoever writes them."""
    chance = random.Random(0)
    with path.open("w") as file:
        for _ in range(number):
            messages = []
            for _ in range(chance.randint(1, 3)):
                a, b = chance.randint(0, 9), chance.randint(0, 9)
                messages += [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": f"{a + b}."}]
            print(json.dumps({"messages": messages}), file=file)


def encode(record: dict[str, Any]) -> dict[str, list[int]]:
    """Return the tokens of a chat (its bytes, for want of a tokenizer) and which of them are trained."""
    tokens, mask = [], []
    for message in record["messages"]:
        content = [*message["content"].encode(), SPECIAL["end"]]
        tokens += [SPECIAL[message["role"]], *content]
        mask += [0, *[int(message["role"] == "assistant")] * len(content)]
    return {"input_ids": tokens, "loss_mask": mask}


def main() -> None:
    """Train on this rank."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    reports: list[StepReport] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        write_chats(path, 4000)
        stream = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
        loader = Loader(
            stream,
            preprocess=encode,
            batch=Bucket([16, 24, 40], batch_size=16),
            collate=SftCollator(pad_token_id=SPECIAL["pad"], pad_to_multiple_of=8),
            mesh=Mesh.from_env(),
            shuffle=Shuffle(window=512),
            epochs=None,
            workers=1,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        result = Trainer(model, loader, optimizer, max_steps=60, max_grad_norm=1.0, on_step=reports.append).train()
    if Mesh.from_env().dp_rank == 0:
        targets = sum(report.num_targets for report in reports) / sum(report.num_tokens for report in reports)
        print(f"sft: {result.step} steps, {targets:.0%} of the tokens trained, loss {reports[0].loss:.2f} -> {reports[-1].loss:.2f}")


if __name__ == "__main__":
    main()
