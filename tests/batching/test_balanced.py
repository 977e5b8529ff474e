"""Balanced global batches: the same records in each step, dealt so that lanes get about as many tokens."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from aioloader import Balanced, ConfigError, FixedBatch, Loader, Mesh, ResumeError, Shuffle
from aioloader.state import merge

LENGTHS = np.random.default_rng(0).lognormal(5, 1, 1000).astype(np.int64) + 1
LANES, BATCH = 4, 8


def collate(samples: list[int]) -> dict[str, Any]:
    return {"x": np.array(samples)}


def make(source: Any, dp_rank: int = 0, dp_size: int = 1, **options: Any) -> Loader:
    defaults = {"batch": FixedBatch(BATCH), "collate": collate, "lanes": LANES, "workers": 0, "shuffle": Shuffle(seed=1)}
    return Loader(source, mesh=Mesh(dp_rank=dp_rank, dp_size=dp_size), **{**defaults, **options})


def steps(source: Any, dp_size: int = 1, **options: Any) -> dict[int, dict[int, list[int]]]:
    found: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for rank in range(dp_size):
        with make(source, rank, dp_size, **options) as loader:
            for batch in loader:
                found[batch.step][batch.lane] = batch["x"].tolist()
    return found


@pytest.mark.parametrize("shuffle", [None, Shuffle(seed=1)])
def test_each_step_has_the_same_records_dealt_evenly(shuffle: Shuffle | None) -> None:
    plain, balanced = (steps(source, shuffle=shuffle) for source in (range(1000), Balanced(range(1000), LENGTHS)))
    assert len(balanced) == 1000 // (LANES * BATCH)
    worst = {"plain": 0.0, "balanced": 0.0}
    for step, lanes in balanced.items():
        assert sorted(itertools.chain(*lanes.values())) == sorted(itertools.chain(*plain[step].values()))
        for name, dealt in (("plain", plain[step]), ("balanced", lanes)):
            tokens = [LENGTHS[records].sum() for records in dealt.values()]
            worst[name] += max(tokens) / np.mean(tokens) / len(balanced)
    assert worst["balanced"] < 1.1 < 1.4 < worst["plain"]


def test_every_number_of_ranks_deals_alike_and_reads_only_its_own() -> None:
    read: list[int] = []

    class Records:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    assert steps(Balanced(Records(), LENGTHS), 4) == steps(Balanced(range(1000), LENGTHS))
    assert len(read) == len(set(read)) == 1000


def test_it_resumes_and_knows_its_lengths() -> None:
    source = Balanced(range(1000), LENGTHS, cost="quadratic")
    with make(source) as loader:
        batches = iter(loader)
        before = [next(batches)["x"].tolist() for _ in range(7)]
        state = batches.state()
    with make(source) as loader:
        loader.load_state_dict(state)
        rest = [batch["x"].tolist() for batch in loader]
    with make(source) as loader:
        assert before + rest == [batch["x"].tolist() for batch in loader]
    with make(source, lanes=5) as loader, pytest.raises(ResumeError, match="num_lanes"):  # the order depends on the lanes
        loader.load_state_dict(merge([state]))
    with make(Balanced(range(1000), LENGTHS + 1, cost="quadratic")) as loader, pytest.raises(ResumeError, match=r"source.balanced.lengths"):
        loader.load_state_dict(state)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one length for each of the 10 records, got 1000 lengths"):
        make(Balanced(range(10), LENGTHS))
    with pytest.raises(ConfigError, match=r"lengths=\).*none negative"):
        Balanced(range(2), [1, -1])
    with pytest.raises(ConfigError, match=r"Loader\(source\).*known size.*FixedBatch"):
        make(Balanced(lambda: iter(range(1000)), LENGTHS))
