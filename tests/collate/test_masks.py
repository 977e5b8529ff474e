"""No token of a packed row sees another document: a real attention model gives each the logits that it gives it alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from aioloader.batching import Pack
from aioloader.collate import PretrainCollator, SftCollator
from aioloader.collate.masks import block_diagonal_causal_mask, flex_mask_mod, varlen_arguments
from aioloader.errors import ConfigError
from aioloader.protocols import Item

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key, value [rows, heads, seq_len, dim] to outputs of the same shape."""

VOCABULARY, HEADS, DIM = 50, 2, 8
SEQ_LEN = 24


class Model(nn.Module):
    """Two attention layers over token and learned position embeddings, as any decoder."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * DIM
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(SEQ_LEN, width)
        self.projections = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.feeds = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)
        self.double().requires_grad_(False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        rows, seq_len = input_ids.shape
        hidden: Tensor = self.tokens(input_ids) + self.positions(position_ids)
        for project, feed in zip(self.projections, self.feeds, strict=True):
            query, key, value = project(hidden).view(rows, seq_len, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
            hidden = hidden + attend(query, key, value).transpose(1, 2).reshape(rows, seq_len, -1)
            hidden = hidden + feed(hidden)
        return cast(Tensor, self.head(hidden))


def attend_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def with_block_mask(batch: Mapping[str, Tensor]) -> Attend:
    mask = block_diagonal_causal_mask(batch["document_ids"])
    return lambda query, key, value: functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def with_flex(batch: Mapping[str, Tensor]) -> Attend:
    rows, seq_len = batch["document_ids"].shape
    mask = create_block_mask(flex_mask_mod(batch["document_ids"]), rows, None, seq_len, seq_len, device="cpu")
    return lambda query, key, value: flex_attention(query, key, value, block_mask=mask)


def with_varlen(batch: Mapping[str, Tensor]) -> Attend:
    """Return what FlashAttention's varlen kernels compute, segment by segment over the flattened tokens."""
    arguments = varlen_arguments(batch)
    borders = arguments["cu_seqlens_q"].tolist()
    assert max(stop - start for start, stop in itertools.pairwise(borders)) == arguments["max_seqlen_q"]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, seq_len, dim = query.shape
        flat = [one.transpose(1, 2).reshape(rows * seq_len, heads, dim) for one in (query, key, value)]
        segments = [[one[start:stop].transpose(0, 1) for one in flat] for start, stop in itertools.pairwise(borders)]
        outputs = torch.cat([attend_causal(*segment).transpose(0, 1) for segment in segments])
        return outputs.view(rows, seq_len, heads, dim).transpose(1, 2)

    return attend


def packed(lengths: Sequence[int], collate: Any = None) -> tuple[dict[str, Tensor], list[NDArray[np.int64]]]:
    """Return a packed micro-batch of random documents, and the documents in the order in which its rows hold them."""
    rng = np.random.default_rng(1)
    samples = [{"input_ids": rng.integers(0, VOCABULARY, length), "loss_mask": rng.integers(0, 2, length)} for length in lengths]
    batcher = Pack(SEQ_LEN, rows=3, strategy="best_fit", overflow="error").start()
    groups = [group for seq, sample in enumerate(samples) for group in batcher.push(Item(sample, seq, 0, ("s", seq)))]
    (group,) = [*groups, *batcher.finish()]
    batch = (collate or PretrainCollator())(list(group.samples))
    documents = [piece["input_ids"] for row in group.samples for piece in row.pieces]
    return {name: torch.from_numpy(np.asarray(values)) for name, values in batch.items()}, documents


def logits_in_batch(batch: Mapping[str, Tensor], attend: Attend) -> Tensor:
    logits: Tensor = Model()(batch["input_ids"], batch["position_ids"], attend)
    assert torch.isfinite(logits).all()
    return logits[batch["document_ids"] >= 0]


def logits_alone(documents: Sequence[NDArray[np.int64]]) -> Tensor:
    model = Model()
    rows = [torch.from_numpy(document)[None] for document in documents]
    return torch.cat([model(row, torch.arange(row.shape[1])[None], attend_causal)[0] for row in rows])


LENGTHS = [9, 5, 14, 3, 1, 8, 11, 6, 7]
every_form = pytest.mark.parametrize("form", [with_block_mask, with_flex, with_varlen])


@every_form
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("collate", [PretrainCollator(), SftCollator(pad_token_id=0)])
def test_logits_of_a_packed_document_are_those_of_it_alone(form: Callable[[Mapping[str, Tensor]], Attend], collate: Any) -> None:
    batch, documents = packed(LENGTHS, collate)
    assert len(batch["input_ids"]) == 3
    assert (batch["document_ids"] < 0).any()
    torch.testing.assert_close(logits_in_batch(batch, form(batch)), logits_alone(documents), rtol=0, atol=1e-9)


def test_a_mask_that_leaks_would_be_noticed() -> None:
    batch, documents = packed(LENGTHS)
    leaking = logits_in_batch(batch, attend_causal)
    assert (leaking - logits_alone(documents)).abs().max() > 1e-2


def test_positions_that_go_on_would_be_noticed() -> None:
    batch, documents = packed(LENGTHS)
    batch["position_ids"] = torch.arange(SEQ_LEN).expand_as(batch["position_ids"])
    assert (logits_in_batch(batch, with_block_mask(batch)) - logits_alone(documents)).abs().max() > 1e-2


def test_multihead_attention_takes_the_inverse_of_the_mask() -> None:
    batch, documents = packed(LENGTHS)
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(HEADS * DIM, HEADS, batch_first=True, dtype=torch.float64).requires_grad_(False)
    embeddings = torch.randn(VOCABULARY, HEADS * DIM, dtype=torch.float64)
    inverse = ~block_diagonal_causal_mask(batch["document_ids"]).expand(-1, HEADS, -1, -1).flatten(0, 1)
    inputs = embeddings[batch["input_ids"]]
    outputs = attention(inputs, inputs, inputs, attn_mask=inverse, need_weights=False)[0][batch["document_ids"] >= 0]
    alone = [embeddings[torch.from_numpy(document)][None] for document in documents]
    causal = [nn.Transformer.generate_square_subsequent_mask(one.shape[1], dtype=torch.float64) for one in alone]
    expected = [attention(one, one, one, attn_mask=mask, need_weights=False)[0][0] for one, mask in zip(alone, causal, strict=True)]
    torch.testing.assert_close(outputs, torch.cat(expected), rtol=0, atol=1e-9)


def test_a_mask_by_hand() -> None:
    mask = block_diagonal_causal_mask(np.array([[0, 0, 1, -1, -1]]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask.dtype == np.bool_
    assert mask[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=3), room=st.integers(0, 3))
def test_array_tensor_and_flex_function_say_the_same(rows: list[list[int]], room: int) -> None:
    seq_len = max(1, max(map(sum, rows)) + room)
    ids = np.full((len(rows), seq_len), -1, dtype=np.int32)
    for row, lengths in zip(ids, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    mask = block_diagonal_causal_mask(ids)
    tensor = torch.from_numpy(ids)
    row_, query, key = torch.meshgrid(torch.arange(len(rows)), torch.arange(seq_len), torch.arange(seq_len), indexing="ij")
    assert (block_diagonal_causal_mask(tensor).numpy() == mask).all()
    assert (flex_mask_mod(tensor)(row_, 0, query, key).numpy() == mask[:, 0]).all()
    # By the definition: the same document, and not later; padding is a document of its own at each place.
    for number, one, other in itertools.product(range(len(rows)), range(seq_len), range(seq_len)):
        sees = one == other or (ids[number, one] == ids[number, other] >= 0 and one > other)
        assert mask[number, 0, one, other] == sees


def test_varlen_arguments_are_those_of_the_batch() -> None:
    batch, _ = packed(LENGTHS)
    arguments = varlen_arguments(batch)
    assert arguments["cu_seqlens_q"] is arguments["cu_seqlens_k"] is batch["cu_seqlens"]
    assert arguments["cu_seqlens_q"].dtype == torch.int32
    assert type(arguments["max_seqlen_q"]) is type(arguments["max_seqlen_k"]) is int


def test_what_was_not_packed_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"varlen_arguments\(batch\): expected a packed micro-batch, got fields \['input_ids'\]; batch with"
    ):
        varlen_arguments({"input_ids": torch.zeros(1, 1)})
    with pytest.raises(ConfigError, match=r"flex_mask_mod\(document_ids\): expected a torch tensor, got ndarray; pass"):
        flex_mask_mod(np.zeros((1, 4), dtype=np.int32))
