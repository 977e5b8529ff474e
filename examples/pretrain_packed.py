"""Pretrain from files that were tokenized and packed offline: tokenize, pack, map, train, data parallel.

    torchrun --standalone --nproc-per-node 2 examples/pretrain_packed.py --output .demo/packed

All ranks ask for the files and one of them writes; a second run finds them there. Training imports no tokenizer and reads what it needs.
The same files from the command line:

    aioloader preprocess FILES... --tokenizer tokenizer.json --seq-len 256 --output .demo/packed/tokens
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from aioloader import DistributedDataLoader, Mesh, PackedDataset, PretrainCollator, StepReport, Trainer
from aioloader.preprocess import PreprocessOptions, preprocess
from stdlib_corpus import END_OF_TEXT, stdlib_files, train_tokenizer

SEQ_LEN, VOCABULARY = 256, 4096
SHAPE = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True
)


def prepare(output: Path) -> Path:
    """Return the file of packed rows, written by whichever rank comes first."""
    tokenizer, tokens = output / "tokenizer.json", output / "tokens"
    files = stdlib_files()[:300]
    if dist.get_rank() == 0 and not tokenizer.exists():
        train_tokenizer(files[:50], vocab_size=VOCABULARY, save_to=tokenizer)
    dist.barrier()
    options = PreprocessOptions(
        inputs=tuple(map(str, files)), tokenizer=str(tokenizer), output=str(tokens), seq_len=SEQ_LEN, eos=END_OF_TEXT, on_error="skip"
    )
    result = preprocess(options)
    assert result.metadata is not None
    statuses = [""] * dist.get_world_size()
    dist.all_gather_object(statuses, result.status)
    if dist.get_rank() == 0:
        print(f"{result.num_documents} documents, {result.metadata.num_tokens:,} tokens: {', '.join(statuses)}")
    return tokens / result.metadata.parts[0].name


def main() -> None:
    """Train on this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the tokenizer and the packed files")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    dataset = PackedDataset(prepare(args.output))
    mesh = Mesh.from_env()
    loader = DistributedDataLoader(dataset, mesh, micro_batch_size=4, collator=PretrainCollator(), num_workers=1, epochs=None)
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    reports: list[StepReport] = []
    Trainer(model, loader, torch.optim.AdamW(model.parameters(), lr=2e-3), max_steps=args.steps, mesh=mesh, on_step=reports.append).train()
    if mesh.dp_rank == 0:
        print(f"packed: {len(dataset):,} rows, {args.steps} steps, loss {reports[0].loss:.2f} -> {reports[-1].loss:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
