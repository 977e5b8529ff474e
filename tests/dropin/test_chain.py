"""load_dataset -> align_dataset -> DistributedIterableDataset -> AsyncPreprocessIterableDataset -> DataLoader -> collator -> model."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from aioloader import Mesh, SftCollator
from aioloader.dropin.align import DatasetAttr, align_dataset
from aioloader.dropin.async_preprocess import AsyncPreprocessIterableDataset
from aioloader.dropin.distributed_iterable import DistributedIterableDataset
from tests.dropin.chat_cases import Supervised
from tests.dropin.hugging_face import streamed, write_json_lines
from tests.dropin.stream_cases import INLINE, split_at

NUM_ROWS = 50
WORDS = ("You", "count", ".", "What", "comes", "after", "?", "does", "user", "assistant")
IGNORE = -100

OWN_WORKERS = {"num_workers": 1, "host": "thread"}
"""A worker process, and the reader in this one, where `datasets` is imported already."""

tokenizers: Any = pytest.importorskip("tokenizers")


def rows() -> list[dict[str, Any]]:
    def turn(role: str, text: str) -> dict[str, str]:
        return {"from": role, "value": text}

    return [
        {
            "id": number,
            "conversations": [
                turn("system", "You count."),
                *itertools.chain(
                    *((turn("human", f"What comes after {number}?"), turn("gpt", f"{number + 1} does")) for _ in range(1 + number % 3))
                ),
            ],
        }
        for number in range(NUM_ROWS)
    ]


def build_tokenizer() -> Any:
    words = ["[PAD]", "[UNK]", "[EOS]", *WORDS, *map(str, range(NUM_ROWS + 1))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def chain(path: str, rank: int, size: int, **options: Any) -> AsyncPreprocessIterableDataset:
    aligned = align_dataset(streamed(path), DatasetAttr(formatting="sharegpt"))
    dealt = DistributedIterableDataset(aligned, Mesh(dp_rank=rank, dp_size=size))
    return AsyncPreprocessIterableDataset(dealt, Supervised(build_tokenizer(), ignore_index=IGNORE), 16, outer_batch_size=4, **options)


class Model(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(size, 16), torch.nn.Linear(16, size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.embed(tokens))
        return hidden


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    arrays = SftCollator(pad_token_id=0, pad_to_multiple_of=8, shift_labels=True)(
        [{"input_ids": np.array(sample["input_ids"]), "labels": np.array(sample["labels"])} for sample in samples]
    )
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def counted(batch: dict[str, torch.Tensor], tokenizer: Any) -> list[int]:
    """Return the number that each row of a batch asks about."""
    texts = [tokenizer.decode(row.tolist()) for row in batch["input_ids"]]
    return [int(text.split("after ")[1].split()[0]) for text in texts]


@pytest.mark.parametrize(("num_workers", "options"), [(0, OWN_WORKERS), (2, INLINE)], ids=["own workers", "DataLoader workers"])
def test_the_chain_trains_a_model_on_all_rows_of_all_ranks(num_workers: int, options: dict[str, Any], tmp_path: Path) -> None:  # A028
    path = write_json_lines(tmp_path, rows())
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = Model(tokenizer.get_vocab_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses, given = [], []
    for rank in range(2):
        seen: list[int] = []
        dataset = chain(path, rank, 2, **options)
        for batch in DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=collate):
            assert batch["input_ids"].shape == batch["labels"].shape
            loss = torch.nn.functional.cross_entropy(
                model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            seen += counted(batch, tokenizer)
        dataset.close()
        assert seen == list(range(rank, NUM_ROWS, 2))
        given += seen
    assert sorted(given) == list(range(NUM_ROWS))
    assert np.mean(losses[-5:]) < 0.8 * losses[0]


def test_one_record_at_a_time_makes_what_a_batched_map_makes(tmp_path: Path) -> None:  # A007
    path = write_json_lines(tmp_path, rows())
    aligned = list(align_dataset(streamed(path), DatasetAttr(formatting="sharegpt")))
    mapped = Supervised(build_tokenizer(), ignore_index=IGNORE)({name: [row[name] for row in aligned] for name in aligned[0]})
    samples = list(chain(path, 0, 1, **INLINE))
    assert {name: [sample[name] for sample in samples] for name in samples[0]} == mapped


def test_a_batched_map_in_its_place_makes_the_same_and_its_batch_size_is_its_own(tmp_path: Path) -> None:  # A010, A018
    stream = streamed(write_json_lines(tmp_path, [{"number": number} for number in range(25)]))
    calls: dict[str, list[int]] = {"mapped": [], "staged": []}

    def double(stage: str, columns: dict[str, list[int]]) -> dict[str, list[int]]:
        calls[stage].append(len(columns["number"]))
        return {"number": [2 * number for number in columns["number"]]}

    mapped = stream.map(partial(double, "mapped"), batched=True, batch_size=10)
    alone = list(mapped)
    assert calls["mapped"] == [10, 10, 5]
    assert list(AsyncPreprocessIterableDataset(stream, partial(double, "staged"), **INLINE)) == alone
    behind_the_map = list(AsyncPreprocessIterableDataset(mapped, partial(double, "staged"), **INLINE))
    assert [sample["number"] for sample in behind_the_map] == [4 * number for number in range(25)]
    assert calls == {"mapped": 2 * [10, 10, 5], "staged": 50 * [1]}


def test_the_chain_resumes_at_the_next_sample(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path, rows())
    whole = list(chain(path, 1, 2, **INLINE))
    first, state = split_at(chain(path, 1, 2, **INLINE), 11)
    again = chain(path, 1, 2, **INLINE)
    again.load_state_dict(state)
    assert first + list(again) == whole
    assert '"examples_iterable"' in str(state).replace("'", '"'), "by the state of the stream, not by reading it again"
