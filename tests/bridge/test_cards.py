from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.bridge.cards import Card, compare, digest, peers_of
from aioloader.errors import SynchronizationError


def explain(rank: int, other: int) -> str:
    return f"what differs between {rank} and {other}"


def cards(dp_size: int = 2, num_peers: int = 2) -> list[Card]:
    return [Card(rank // num_peers, dp_size, 0, 1, 2 * dp_size, 11, 22, 0, 5, 1) for rank in range(dp_size * num_peers)]


@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_ranks_that_are_built_alike_fit_in_any_layout(dp_size: int, num_peers: int, shuffler: random.Random) -> None:
    every = cards(dp_size, num_peers)
    shuffler.shuffle(every)
    compare(every, explain)
    assert sorted(rank for dp_rank in range(dp_size) for rank in peers_of(every, dp_rank)) == list(range(len(every)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared": 12}, r"same configuration on all 4 ranks, got rank 0, 1, 2 against rank 3 \(what differs between 0 and 3\)"),
        ({"own": 23}, r"ranks 2, 3, which share dp_rank 1, .* got rank 2 and rank 3 that differ \(what differs between 2 and 3\)"),
        ({"step": 7}, r"same step, got epoch 0, step 5, from a loaded state, on rank 0, 1, 2 against epoch 0, step 7, .* on rank 3; load"),
        ({"is_resumed": 0}, r"epoch 0, step 5 on rank 3; load the states of one checkpoint on all ranks, or on none"),
        ({"dp_size": 4}, r"same dp_size on all ranks, got dp_size 2 on rank 0, 1, 2 against dp_size 4 on rank 3"),
        ({"cp_size": 2}, r"same cp_size on all ranks"),
        ({"num_lanes": 8}, r"same num_lanes"),
        ({"dp_rank": 0}, r"equally many of 4 ranks, got dp_rank 1 on 1 and dp_rank 0 on 3 \(ranks 0, 1, 3\); take dp_rank from the device"),
    ],
)
def test_one_rank_that_differs_is_named(changes: dict[str, int], message: str) -> None:
    every = cards()
    every[3] = every[3]._replace(**changes)
    with pytest.raises(SynchronizationError, match=message):
        compare(every, explain)


def test_a_step_that_others_have_begun_is_resumed_and_not_begun() -> None:
    every = cards()
    ahead = [*every[:3], every[3]._replace(step=6)]
    compare(ahead, explain)
    with pytest.raises(SynchronizationError, match="same step"):
        compare([card._replace(is_resumed=0) for card in ahead], explain)


def test_each_part_of_the_sequences_is_on_equally_many_ranks() -> None:
    every = [card._replace(cp_size=2, cp_rank=rank % 2) for rank, card in enumerate(cards())]
    compare(every, explain)
    with pytest.raises(SynchronizationError, match=r"each cp_rank from 0 to 1 on equally many of 2 ranks, got cp_rank 1 on 0 and"):
        compare([*every[:3], every[3]._replace(cp_rank=0)], explain)


def test_epochs_have_to_be_the_same_unless_lanes_have_drifted_apart_in_a_run_that_is_resumed() -> None:
    apart = [*cards()[:3], cards()[3]._replace(epoch=1)]
    compare(apart, explain)
    with pytest.raises(SynchronizationError, match=r"epoch 0, step 5 on rank 0, 1, 2 against epoch 1, step 5 on rank 3"):
        compare([card._replace(is_resumed=0) for card in apart], explain)


def test_data_parallel_ranks_may_have_sources_of_their_own() -> None:
    every = [card._replace(own=card.dp_rank) for card in cards()]
    compare(every, explain)


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})
    assert 0 <= digest({"a": 1}) < 1 << 62
