"""Replay: any micro-batch is made again alone, bit for bit."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from aioloader import Bucket, ConfigError, FixedBatch, Loader, Mesh, Mixture, Pack, PretrainCollator, ResumeError, SftCollator, Shuffle
from aioloader.pools.rng import record_rng
from aioloader.state import merge
from tests.contract.cases import documents, some_or_many

LANES = 4


def noisy(record: dict[str, Any]) -> Any:
    """Filter, multiply and augment."""
    made = some_or_many(record)
    return made and [
        {"input_ids": sample["input_ids"] + int(record_rng().integers(100)), "labels": sample["input_ids"]}
        for sample in (made if isinstance(made, list) else [made])
    ]


KINDS: dict[str, dict[str, Any]] = {
    "fixed": {"source": documents(200), "batch": FixedBatch(2), "collate": PretrainCollator(), "shuffle": Shuffle(seed=1)},
    "packed": {"source": documents(200), "batch": Pack(16, rows=1, strategy="best_fit"), "collate": PretrainCollator()},
    "bucket": {"source": lambda: iter(documents(200)), "batch": Bucket((4, 8, 16), batch_size=2), "collate": SftCollator(pad_token_id=0)},
    "padded": {"source": documents(90), "batch": FixedBatch(4), "collate": PretrainCollator(), "end": "pad"},
    "mixture": {
        "source": Mixture({"a": (documents(150), 0.6), "b": (lambda: iter(documents(90)), 0.4)}),
        "batch": FixedBatch(2),
        "collate": PretrainCollator(),
        "shuffle": Shuffle(window=16, seed=1),
        "epochs": 2,
    },
}


def make(kind: str, dp_rank: int = 0, dp_size: int = 2, **options: Any) -> Loader:
    defaults = {"preprocess": noisy, "lanes": LANES, "workers": 0, "mesh": Mesh(dp_rank=dp_rank, dp_size=dp_size)}
    chosen = {**defaults, **KINDS[kind], **options}
    return Loader(chosen.pop("source"), **chosen)


def same(left: Any, right: Any) -> bool:
    facts = [(batch.step, batch.lane, batch.epoch, batch.samples, sorted(batch), batch.num_tokens) for batch in (left, right)]
    return facts[0] == facts[1] and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("kind", KINDS)
def test_any_micro_batch_is_made_again(kind: str) -> None:
    delivered: list[Any] = []
    states: list[Any] = []
    for rank in range(2):
        with make(kind, rank) as loader:
            delivered += loader
    with make(kind) as loader:
        early = iter(loader)
        list(itertools.islice(early, 6))
        states.append(json.loads(json.dumps(early.state())))
    with make(kind, 1) as loader:
        early = iter(loader)
        list(itertools.islice(early, 6))
        states.append(early.state())
    whole = merge(states)
    replayer = make(kind)
    delivered = [batch for batch in delivered if not batch.is_filler]
    assert len(delivered) > 20
    for batch in delivered[:: max(1, len(delivered) // 12)]:
        assert same(replayer.replay(step=batch.step, lane=batch.lane), batch)
        if batch.step >= 3:
            assert same(replayer.replay(step=batch.step, lane=batch.lane, state=whole), batch)


def test_it_reads_nothing_of_other_lanes() -> None:
    read: list[int] = []

    class Records:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> dict[str, Any]:
            read.append(index)
            return {"number": 2, "tokens": [index]}

    options: dict[str, Any] = {"batch": FixedBatch(2), "collate": PretrainCollator(), "preprocess": some_or_many}
    with Loader(Records(), lanes=4, workers=0, **options) as loader:
        batch = loader.replay(step=3, lane=1)
    assert [sample.row for sample in batch.samples] == [25, 29]
    assert set(read) <= set(range(1, 40, 4))


def test_what_cannot_be_replayed() -> None:
    with make("fixed") as loader:
        for _ in itertools.islice(batches := iter(loader), 8):
            pass
        late = batches.state()
        batches.close()
        with pytest.raises(ConfigError, match=r"lane=.*from 0 to 3.*got 4"):
            loader.replay(step=0, lane=4)
        with pytest.raises(ConfigError, match=r"step=.*got -1"):
            loader.replay(step=-1, lane=0)
        with pytest.raises(ConfigError, match=r"step=.*lane 0 has in the pass up to epoch 1, got 999"):
            loader.replay(step=999, lane=0)
        with pytest.raises(ResumeError, match=r"(?s)replay\(step=1\).*step: expected 'at most 1', got 4"):
            loader.replay(step=1, lane=0, state=late)
        with pytest.raises(ResumeError, match="lane 1 among them"):
            loader.replay(step=9, lane=1, state=late)
        with make("fixed", seed=8) as other, pytest.raises(ResumeError, match="seed"):
            other.replay(step=9, lane=0, state=late)
