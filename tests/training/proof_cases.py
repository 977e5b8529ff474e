"""What the proof of value trains: four small models on four kinds of data, each with another way to make batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from aioloader import (
    Bucket,
    FixedBatch,
    JsonLines,
    Mixture,
    Pack,
    PretrainCollator,
    Ramp,
    SftCollator,
    Shuffle,
    StackCollator,
    TextFiles,
    TokenBudget,
)
from aioloader.collate import block_diagonal_causal_mask
from tests.training.proof_work import Chat, Paragraphs, RandomSpan, augment, images, small_modules

VOCABULARY, SEQ_LEN = 512, 128

Options: TypeAlias = dict[str, Any]


class LanguageModel(nn.Module):
    """One layer of attention; shorter documents than a row need no more places than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.places = nn.Embedding(SEQ_LEN, 32)
        self.mix = nn.Linear(32, 96)
        self.output = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places(places)
        query, key, value = self.mix(hidden).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        logits: Tensor = self.output(hidden + seen.transpose(1, 2).flatten(2))
        return logits


def language_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    tokens = batch["input_ids"]
    if "document_ids" in batch:
        documents, places = batch["document_ids"], batch["position_ids"]
    else:
        documents, places = batch["attention_mask"] - 1, torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = model(tokens, places, block_diagonal_causal_mask(documents))
    targets = batch["labels"][:, 1:]
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, torch.count_nonzero(targets != -100)


def image_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def image_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"], reduction="sum"), len(batch["label"])


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def packed_text(data: Path) -> Options:
    batch = Pack(SEQ_LEN, rows=2, strategy="best_fit", open_bins=4)
    work = Paragraphs(str(data / "tokenizer.json"))
    return {"source": TextFiles(small_modules()), "preprocess": work, "batch": batch, "collate": PretrainCollator(), "shuffle": Shuffle()}


def bucketed_chats(data: Path) -> Options:
    batch = Bucket((32, 64, SEQ_LEN), max_tokens=256, overflow="drop")
    options = {"preprocess": Chat(str(data / "tokenizer.json")), "batch": batch, "collate": SftCollator(pad_token_id=0)}
    return {"source": JsonLines(data / "chats.jsonl"), "shuffle": Shuffle(window=16), **options}


def ramped_mixture(data: Path) -> Options:
    """All code at first, all prose after 120 records."""
    sources = {"code": (TextFiles(small_modules()), 1.0), "prose": (JsonLines(data / "prose.jsonl"), 0.0)}
    mixture = Mixture(sources, schedule=Ramp([(0, {"code": 1.0, "prose": 0.0}), (120, {"code": 0.0, "prose": 1.0})]), stop="repeat")
    work = RandomSpan(str(data / "tokenizer.json"))
    return {"source": mixture, "preprocess": work, "batch": TokenBudget(256), "collate": PretrainCollator(), "shuffle": Shuffle(window=16)}


def augmented_images(data: Path) -> Options:
    return {"source": images(data), "preprocess": augment, "batch": FixedBatch(4), "collate": StackCollator(), "shuffle": Shuffle()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained on what; `data` makes the loader's options of the directory where the data are."""

    data: Callable[[Path], Options]
    model: Callable[[], nn.Module] = LanguageModel
    loss: Callable[[nn.Module, Any], Any] = language_loss
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw


CASES = {
    "packed_text": Case(data=packed_text),
    "bucketed_chats": Case(data=bucketed_chats),
    "ramped_mixture": Case(data=ramped_mixture),
    "augmented_images": Case(data=augmented_images, model=image_model, loss=image_loss, optimizer=sgd),
}
