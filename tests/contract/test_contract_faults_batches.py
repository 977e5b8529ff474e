"""Faults that people reported of comparable loaders, as tests: packing, masks, bucketing, mixtures.

A number like K24 is the fault that a test rules out; `test_contract_coverage.py` lists them all, with those that other tests show.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioloader import (
    BatchError,
    Bucket,
    FixedBatch,
    JsonLines,
    Loader,
    Mixture,
    Pack,
    PretrainCollator,
    ResumeError,
    SftCollator,
    Shuffle,
    TokenBudget,
)
from aioloader.batching import Message, fit_messages, join_messages
from tests.contract.cases import INLINE, THREADS, collate, documents, drain, name_of, numbers, some_or_many


def of_lengths(lengths: list[int]) -> list[dict[str, Any]]:
    """Return a sample of each length, whose tokens tell its number."""
    return [{"input_ids": np.full(length, number), "labels": np.full(length, number)} for number, length in enumerate(lengths)]


def lengths_of(samples: list[Any]) -> dict[str, Any]:
    return {"x": np.array([sample["length"] for sample in samples])}


def make(samples: Any, batch: Any, **options: Any) -> Loader:
    return Loader(samples, **{"batch": batch, "collate": SftCollator(pad_token_id=0), **INLINE, **options})


def tokens_in(batches: Iterable[Any]) -> Counter[int]:
    """Return how many tokens of each sample are in packed rows, padding left out."""
    return Counter(token for batch in batches for token in batch["input_ids"][batch["document_ids"] >= 0].tolist())


# Packing


@pytest.mark.parametrize(
    "batch",
    [Pack(16), Pack(16, strategy="first_fit", open_bins=8), Pack(16, strategy="best_fit", open_bins=8)],
    ids=lambda batch: batch.strategy,
)
@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
def test_each_epoch_ends_with_all_documents_and_leaves_the_packer_empty(batch: Pack, options: dict[str, Any]) -> None:
    """K22: documents that the packer still holds at the end are neither lost nor packed with those of the next epoch."""
    lengths = [number * 5 % 13 + 1 for number in range(13)]
    with make(of_lengths(lengths), batch, epochs=3, end="pad", **options) as loader:
        batches = list(loader)
        (lane,) = loader.state_dict()["lanes"].values()
    for epoch in range(3):
        assert tokens_in(batch for batch in batches if batch.epoch == epoch) == dict(enumerate(lengths))
    rows = [[batch["input_ids"].tolist() for batch in batches if batch.epoch == epoch] for epoch in range(3)]
    assert rows[0] == rows[1] == rows[2], "each epoch begins with an empty packer"
    held = {name: value for name, value in lane["batcher"].items() if name != "counters"}
    assert not any(held.values()), "and the last one leaves it empty: the state refers to no document"


@pytest.mark.parametrize(
    ("overflow", "out", "reported"),
    [
        ("split", [9, 2, 3, 1], {}),
        ("truncate", [4, 2, 3, 1], {"truncated_samples": 1, "truncated_tokens": 5}),
        ("drop", [0, 2, 3, 1], {"dropped_samples": 1, "dropped_tokens": 9}),
    ],
)
@pytest.mark.parametrize("strategy", ["greedy", "best_fit"])
def test_tokens_of_a_long_document_are_delivered_or_reported(
    strategy: Any, overflow: Any, out: list[int], reported: dict[str, int]
) -> None:
    """K24."""
    batch = Pack(4, strategy=strategy, overflow=overflow)
    with make(of_lengths([9, 2, 3, 1]), batch, end="pad") as loader:
        delivered = tokens_in(loader)
        counts = loader.stats()["records"]
    assert [delivered[number] for number in range(4)] == out
    lost = {name: counts[f"batching_{name}"] for name in ("truncated_samples", "truncated_tokens", "dropped_samples", "dropped_tokens")}
    assert {name: count for name, count in lost.items() if count} == reported
    assert delivered.total() + lost["truncated_tokens"] + lost["dropped_tokens"] == 15
    assert counts["delivered_tokens"] == delivered.total()


def test_a_long_document_that_is_an_error_is_named() -> None:
    """K24, K30: by the record's id, after everything before it."""
    with make(of_lengths([2, 2, 9, 1]), Pack(4, overflow="error")) as loader:
        batches = iter(loader)
        assert next(batches)["input_ids"].tolist() == [[0, 0, 1, 1]]
        with pytest.raises(BatchError, match=r"record sequence\[2\], seq 2: Pack: expected at most seq_len=4 tokens, got 9"):
            next(batches)


def test_another_row_length_is_refused_on_resume() -> None:
    """B047: what the packer holds was packed for rows of 16."""
    with make(documents(60), Pack(16), preprocess=some_or_many, collate=PretrainCollator()) as loader:
        state = list(itertools.islice(loader, 3))[-1].state()
    with (
        make(documents(60), Pack(32), preprocess=some_or_many, collate=PretrainCollator()) as loader,
        pytest.raises(ResumeError, match=r"batch\.seq_len: expected 32 \(this loader\), got 16 \(the state\)"),
    ):
        loader.load_state_dict(state)


# Counting


def test_real_tokens_and_slots_are_separate_figures_and_totals_go_on_after_a_resume() -> None:
    """K79: five micro-batches of 10 and 2 tokens, padded to 10 each."""
    samples, state = of_lengths([10, 2] * 5), None
    for num_batches in (2, 3):
        with make(samples, FixedBatch(2)) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            batches = list(itertools.islice(loader, num_batches))
            state = loader.state_dict()
            total = loader.stats()["records"]["delivered_tokens"]
        assert [(batch.num_tokens, batch["input_ids"].numel()) for batch in batches] == [(12, 20)] * num_batches
        assert {batch.num_tokens + batch.num_padding for batch in batches} == {20}
    assert total == 60


# From a file of talks to a model


def tokens_of(text: str) -> list[int]:
    """Return the toy tokenizer's tokens: one per character, 0 to 3 are special."""
    return [4 + ord(character) % 60 for character in text]


def prepare(record: dict[str, Any]) -> Any:
    """Align, tokenize and cut to length."""
    roles = {"human": "user", "gpt": "assistant"}
    messages = [
        Message(roles.get(turn["from"], turn["from"]), tokens_of(turn["value"]), opening=[1], closing=[2])
        for turn in record["conversations"]
    ]
    fitting = fit_messages(messages, 64, marker=[3])
    return fitting and join_messages(fitting)


def test_a_file_of_talks_becomes_what_a_model_trains_on_and_each_row_tells_its_lines(tmp_path: Path) -> None:
    """A028, B071: file, preprocess, packing, collator, model; and back from a row to the text that it was made of."""
    path = tmp_path / "talks.jsonl"
    talks = [
        [("system", "Be brief."), ("human", f"What is {number} + {number}?"), ("gpt", f"It is {2 * number}." * (1 + number % 3))]
        for number in range(40)
    ]
    lines = [{"conversations": [{"from": role, "value": text} for role, text in talk]} for talk in talks]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = Pack(96, rows=2, strategy="best_fit", overflow="error")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
    found = []
    with make(JsonLines(path), batch, preprocess=prepare, **THREADS, end="pad") as loader:
        for one in loader:
            logits = model(one["input_ids"])[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, one["labels"][:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            assert 0 < loss.item() < 10
            rows = one["input_ids"].flatten().tolist()
            for sample in one.samples:
                assert path.name in sample.shard
                made = prepare(json.loads(path.read_text().splitlines()[sample.row]))["input_ids"].tolist()
                assert any(rows[first : first + len(made)] == made for first in range(len(rows)))
                found.append(sample.row)
    assert sorted(found) == list(range(40))
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


# Budgets and buckets


@pytest.mark.parametrize("batch", [TokenBudget, Bucket])
def test_one_sample_over_the_budget_late_in_the_epoch(batch: Any) -> None:
    """K30: sample 700 of 900 is too long; the other 899 arrive, or all before it and an error that names it."""

    def run(overflow: Any) -> tuple[list[int], Any, dict[str, int]]:
        options: Any = TokenBudget(256, overflow=overflow) if batch is TokenBudget else Bucket([64, 256], batch_size=4, overflow=overflow)
        with make(of_lengths([64] * 700 + [257] + [64] * 199), options, end="pad") as loader:
            delivered, error = drain(loader, of=lambda one: [sample.row for sample in one.samples])
            return delivered, error, loader.stats()["records"]

    others = [number for number in range(900) if number != 700]
    delivered, error, counts = run("drop")
    assert (sorted(delivered), error, counts["batching_dropped_samples"]) == (others, None, 1)
    delivered, error, counts = run("alone")
    assert (sorted(delivered), error, counts["batching_alone_samples"]) == (list(range(900)), None, 1)
    delivered, error, _ = run("error")
    assert delivered == list(range(700))
    assert isinstance(error, BatchError)
    assert error.record == ("sequence", 700)


def test_batches_of_sorted_data_do_not_come_sorted() -> None:
    """K32: samples lie sorted by length, are shuffled and put in buckets; the mean length of batches has no trend."""
    samples = [{"length": length} for length in sorted(np.random.default_rng(1).integers(1, 401, 4000).tolist())]
    bucket = Bucket(range(50, 401, 50), batch_size=16, field="length")
    with make(samples, bucket, shuffle=Shuffle(seed=2), collate=lengths_of) as loader:
        means = [batch["x"].double().mean().item() for batch in loader]
    assert len(means) > 230
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.2


def test_buckets_do_not_change_the_shares_of_a_mixture() -> None:
    """B105: in any 1000 samples as many short and long ones as without buckets, give or take what waits: of 200 samples, 20 are long."""
    sources = {"talk": ([{"length": 8}] * 4000, 0.6), "code": ([{"length": 200}] * 4000, 0.3), "book": ([{"length": 900}] * 4000, 0.1)}

    def shares(batch: Any) -> list[Counter[str]]:
        with make(Mixture(sources), batch, collate=lengths_of) as loader:
            names = [sample.shard.partition("/")[0] for one in itertools.islice(loader, 340) for sample in one.samples]
        return [Counter(names[first : first + 1000]) for first in range(0, 5000, 1000)]

    bucketed = shares(Bucket([16, 256, 1024], batch_size=(16, 16, 128), max_age=200, field="length"))
    for with_buckets, without in zip(bucketed, shares(FixedBatch(16)), strict=True):
        assert without == {"talk": 600, "code": 300, "book": 100}
        assert all(abs(with_buckets[name] - without[name]) <= 21 for name in sources)


# Mixtures


def test_sources_that_are_not_repeated_are_all_gone_through() -> None:
    """K33: the shortest does not end the mixture; the others go on in turn."""
    sources: dict[str, Any] = {"a": ([0, 1], 1), "b": ([10, 11, 12, 13, 14], 1), "c": ([20, 21, 22], 1)}
    mixture = Mixture(sources, stop="all_exhausted", repeats={"a": 1, "b": 1, "c": 1})
    with make(mixture, FixedBatch(1), collate=collate) as loader:
        assert numbers(loader) == [0, 10, 20, 1, 11, 21, 12, 22, 13, 14]


def test_a_shuffle_does_not_change_when_a_mixture_ends() -> None:
    """K34: sources are shuffled before they are mixed: as many of each, every id at least once, and equally often but in a last pass."""
    sources: dict[str, Any] = {"a": ([0, 1, 2], 1), "b": ([10, 11, 12, 13, 14], 1), "c": ([20, 21, 22, 23], 1)}
    delivered = []
    for shuffle in (None, *(Shuffle(window=4, seed=seed) for seed in range(5))):
        with make(Mixture(sources, stop="all_exhausted"), FixedBatch(1), collate=collate, shuffle=shuffle) as loader:
            delivered.append(numbers(loader))
    assert len(set(map(tuple, delivered))) == 6
    plain, *shuffled = map(Counter, delivered)
    for counts in shuffled:
        for source, _ in sources.values():
            assert sum(counts[number] for number in source) == sum(plain[number] for number in source)
            assert {counts[number] for number in source} <= {1, 2}
