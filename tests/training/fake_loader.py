"""A deterministic loader over a list of micro-batches, dealt out by lane, with state: what Trainer needs, and no engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aioloader.order.mesh import Mesh

VOCABULARY = 17


@dataclass(frozen=True)
class FakeSample:
    """Where a sample came from."""

    record: tuple[str, int]


class FakeBatch(dict[str, Tensor]):
    """A micro-batch."""

    def __init__(self, fields: Mapping[str, Tensor], *, index: int, num_tokens: int = 0, is_filler: bool = False) -> None:
        super().__init__(fields)
        self.index = index
        self.samples = [FakeSample(("fake", index))]
        self.num_tokens = num_tokens
        self.num_padding = 0
        self.step = 0
        self.lane = 0
        self.is_filler = is_filler

    def to(self, device: torch.device) -> FakeBatch:
        fields = {name: tensor.to(device) for name, tensor in self.items()}
        batch = FakeBatch(fields, index=self.index, num_tokens=self.num_tokens, is_filler=self.is_filler)
        batch.num_padding = self.num_padding
        return batch


@dataclass
class FakeLoader:
    """Delivers the batches whose place modulo `num_lanes` is a lane of this rank.

    Raises in place of batch `fails_at`; gives a state that JSON would change after batch `bad_state_at`.
    """

    batches: Sequence[FakeBatch]
    num_lanes: int
    mesh: Mesh = field(default_factory=Mesh)
    fails_at: int | None = None
    bad_state_at: int | None = None
    num_closed: int = 0
    first: int = 0

    def __iter__(self) -> Iterator[FakeBatch]:
        for index in range(self.first, len(self.batches)):
            if index % self.num_lanes % self.mesh.dp_size == self.mesh.dp_rank:
                if index == self.fails_at:
                    raise OSError("the upstream failed")
                yield self.batches[index]

    def state_dict(self, *, after: FakeBatch) -> Any:
        return {"next": (after.index,) if after.index == self.bad_state_at else after.index + 1}

    def load_state_dict(self, state: Any) -> None:
        self.first = state["next"]

    def close(self) -> None:
        self.num_closed += 1


class TinyModel(nn.Module):
    """Predicts the next token from this one and its place."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.places = nn.Embedding(16, 8)
        self.unused = nn.Linear(2, 2)
        self.output = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = self.output(torch.tanh(self.tokens(input_ids) + self.places(position_ids)))
        return logits


def language_batch(index: int, *, rows: int = 2, seq_len: int = 12) -> FakeBatch:
    """Return rows of random tokens, of lengths that differ from batch to batch; the rest is padding without targets."""
    generator = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(VOCABULARY, (rows, seq_len), generator=generator)
    lengths = torch.randint(2, seq_len + 1, (rows, 1), generator=generator)
    places = torch.arange(seq_len).expand(rows, seq_len)
    fields = {"input_ids": tokens, "position_ids": places, "labels": tokens.masked_fill(places >= lengths, -100)}
    batch = FakeBatch(fields, index=index, num_tokens=int(lengths.sum()))
    batch.num_padding = rows * seq_len - batch.num_tokens
    return batch


def language_batches(count: int) -> list[FakeBatch]:
    return [language_batch(index) for index in range(count)]
