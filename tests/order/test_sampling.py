"""Sampling: every dealing is a disjoint cover, a prefix can be dealt on to any number of ranks, and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader import ConfigError, ResumeError
from aioloader.order.sampling import Sampling, merge_states

SIZES = st.integers(0, 200)
RANKS = st.integers(1, 9)
MODES = st.sampled_from(["stride", "block"])


def share(sampling: Sampling, rank: int, *, epoch: int = 0, start: int = 0, num: int | None = None) -> list[int]:
    """Return the first `num` indices of a rank from `start` on."""
    last = sampling.count(rank, start) if num is None else num
    found: list[int] = sampling.indices(epoch)(sampling.positions(rank, start, 0, last)).tolist()
    return found


def flat(parts: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def shares(sampling: Sampling, *, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [share(sampling, rank, epoch=epoch, start=start) for rank in range(sampling.dp_size)]


@settings(max_examples=50)
@given(SIZES, RANKS, MODES, st.booleans())
def test_a_kept_epoch_is_a_disjoint_cover_of_parts_that_differ_by_one(size: int, ranks: int, mode: str, shuffle: bool) -> None:
    dealt = shares(Sampling(num_records=size, dp_size=ranks, tail="keep", mode=mode, shuffle=shuffle))
    assert sorted(flat(dealt)) == list(range(size))
    assert {len(one) for one in dealt} <= {size // ranks, -(-size // ranks)}


@settings(max_examples=50)
@given(SIZES, RANKS, MODES)
def test_a_dropped_tail_is_shorter_than_one_round(size: int, ranks: int, mode: str) -> None:
    """B017, C037, D001: pairwise disjoint, floor(size / ranks) each."""
    dealt = shares(Sampling(num_records=size, dp_size=ranks, mode=mode))
    indices = flat(dealt)
    assert len(set(indices)) == len(indices) == size // ranks * ranks
    assert {len(one) for one in dealt} == {size // ranks}


@settings(max_examples=50)
@given(st.integers(1, 200), RANKS, MODES)
def test_a_padded_epoch_has_every_index_and_repeats_those_from_its_beginning(size: int, ranks: int, mode: str) -> None:
    sampling = Sampling(num_records=size, dp_size=ranks, tail="pad", mode=mode)
    dealt = shares(sampling)
    assert {len(one) for one in dealt} == {-(-size // ranks)}
    order = sampling.indices(0)(np.arange(size)).tolist()
    assert sorted(flat(dealt)) == sorted(order[at % size] for at in range(-(-size // ranks) * ranks))


def test_blocks_are_contiguous_slices() -> None:
    """C015."""
    dealt = shares(Sampling(num_records=24, dp_size=4, mode="block", shuffle=False))
    assert dealt == [list(range(first, first + 6)) for first in (0, 6, 12, 18)]
    assert shares(Sampling(num_records=10, dp_size=3, mode="block", shuffle=False, tail="keep")) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


@settings(max_examples=40)
@given(st.integers(1, 300), st.lists(st.tuples(RANKS, st.integers(0, 12)), min_size=1, max_size=4))
def test_what_is_left_can_be_dealt_to_other_ranks_again_and_again(size: int, stages: list[tuple[int, int]]) -> None:
    """C048, C049, F9: after any steps on any numbers of ranks nothing is repeated, and what is left is the rest of the same order."""
    seen: list[int] = []
    start = 0
    for ranks, steps in stages:
        sampling = Sampling(num_records=size, dp_size=ranks, seed=5)
        steps = min(steps, sampling.count(0, start))
        seen += [one for rank in range(ranks) for one in share(sampling, rank, start=start, num=steps)]
        start = sampling.read_state(json.loads(json.dumps(sampling.state(0, start + steps * ranks))))[1]
    order = Sampling(num_records=size, dp_size=1, seed=5).indices(0)(np.arange(size)).tolist()
    assert sorted(seen) == sorted(order[:start])
    left = shares(Sampling(num_records=size, dp_size=3, seed=5, tail="keep"), start=start)
    assert sorted(flat(left)) == sorted(order[start:])


def test_the_order_depends_on_seed_and_epoch_and_not_on_their_sum() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return share(Sampling(num_records=100, dp_size=1, seed=seed), 0, epoch=epoch)

    orders = [order(42, 0), order(42, 1), order(43, 0), order(43, 1)]
    assert all(sorted(one) == list(range(100)) for one in orders)
    assert len({tuple(one) for one in orders}) == 4
    assert order(42, 0)[:8] == [37, 75, 76, 12, 39, 27, 18, 70], "another order breaks the states of running jobs"


def test_an_offset_in_a_huge_dataset_costs_nothing() -> None:
    sampling = Sampling(num_records=10**12, dp_size=4)
    assert len(set(share(sampling, 1, start=4 * 10**11, num=100))) == 100


def test_digests_tell_apart_what_would_deal_out_differently() -> None:
    """C014, C039, D022."""

    def digest(**changed: Any) -> str:
        return Sampling(**{"num_records": 50, "dp_size": 4, "seed": 1} | changed).digest(0)

    assert digest() == digest()
    others = [
        digest(seed=2),
        digest(dp_size=8),
        digest(num_records=51),
        digest(shuffle=False),
        digest(tail="pad"),
        digest(mode="block"),
    ]
    assert len({digest(), *others}) == 7
    assert Sampling(num_records=50, dp_size=4, seed=1).digest(1) != digest()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_records": 11}, "num_records: expected 11 .*, got 10"),
        ({"seed": 7}, "seed: expected 7 .*, got 0"),
        ({"mode": "block"}, "mode: expected 'block' .*, got 'stride'"),
        ({"shuffle": False}, "shuffle: expected False .*, got True"),
        ({"tail": "pad"}, "tail: expected 'pad' .*, got 'drop'"),
        ({"order": "torch"}, "order: expected 'torch' .*, got 'keyed'"),
    ],
)
def test_a_state_of_another_configuration_is_refused_naming_both(changed: dict[str, Any], message: str) -> None:
    state = Sampling(num_records=10, dp_size=2).state(0, 4)
    message = message.replace(" .*", "")
    with pytest.raises(ResumeError, match=message):
        Sampling(**{"num_records": 10, "dp_size": 2} | changed).read_state(state)


def test_blocks_go_on_with_as_many_ranks_only() -> None:
    state = Sampling(num_records=24, dp_size=4, mode="block").state(0, 8)
    assert Sampling(num_records=24, dp_size=4, mode="block").read_state(state) == (0, 8)
    with pytest.raises(ResumeError, match="dp_size: expected 8, got 4\nresume blocks on as many ranks"):
        Sampling(num_records=24, dp_size=8, mode="block").read_state(state)


@pytest.mark.parametrize("damage", [{"offset": -1}, {"offset": 4.0}, {"epoch": None}, {"dp_size": 0}, {"offset": 99}, {"version": 0}])
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    sampling = Sampling(num_records=10, dp_size=2)
    with pytest.raises(ResumeError, match=next(iter(damage))):
        sampling.read_state({**sampling.state(0, 4), **damage})
    with pytest.raises(ResumeError, match="a dict of version, epoch, offset"):
        sampling.read_state({"epoch": 0})


def test_states_of_ranks_after_different_steps_are_not_one_state() -> None:
    sampling = Sampling(num_records=24, dp_size=4)
    assert merge_states([sampling.state(0, 8)] * 4) == sampling.state(0, 8)
    with pytest.raises(ResumeError, match=r"state 3: offset: expected '8, as in state 0', got 12\nsave on all ranks after the same step"):
        merge_states([sampling.state(0, 8)] * 3 + [sampling.state(0, 12)])
    with pytest.raises(ResumeError, match="states: expected 4, got 3"):
        merge_states([sampling.state(0, 8)] * 3)
    with pytest.raises(ResumeError, match="expected 'one of each rank', got 'none'"):
        merge_states([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_records": [1, 2]}, r"dataset_size=\): expected an int of at least 0, got \[1, 2\]; pass len\(dataset\)"),
        ({"seed": -1}, "seed=.*got -1"),
        ({"tail": "repeat"}, "tail=.*'drop', 'pad', 'keep', got 'repeat'"),
        ({"mode": "rows"}, "mode=.*'stride', 'block', got 'rows'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**{"num_records": 10, "dp_size": 2} | options)
