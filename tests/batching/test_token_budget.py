from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.batching.token_budget import TokenBudget
from aioloader.collate import SftCollator
from aioloader.errors import BatchError, ConfigError, ResumeError
from aioloader.protocols import Group, Item

budgets = st.builds(
    TokenBudget,
    st.integers(6, 40),
    padded=st.just(True),
    multiple_of=st.integers(1, 6),
    max_samples=st.none() | st.integers(1, 5),
    overflow=st.sampled_from(["drop", "alone"]),
) | st.builds(
    TokenBudget,
    st.integers(1, 40),
    padded=st.just(False),
    max_samples=st.none() | st.integers(1, 5),
    overflow=st.sampled_from(["drop", "alone"]),
)
lengths_lists = st.lists(st.integers(0, 45), max_size=40)


def make_items(lengths: Sequence[int]) -> list[Item]:
    return [Item({"input_ids": [seq] * length}, seq, 0, ("shard", seq)) for seq, length in enumerate(lengths)]


def groups_of(batching: TokenBudget, items: Sequence[Item]) -> tuple[list[Group], dict[str, int]]:
    batcher = batching.start()
    groups = [group for item in items for group in batcher.push(item)] + list(batcher.finish())
    return groups, {name: count for name, count in batcher.counters().items() if count}


def lengths_of(groups: Sequence[Group]) -> list[list[int]]:
    return [[len(sample["input_ids"]) for sample in group.samples] for group in groups]


def cost_of(batching: TokenBudget, lengths: Sequence[int]) -> int:
    """Return the cost of a micro-batch as the documentation defines it."""
    rounded = max(lengths) + -max(lengths) % batching.multiple_of
    return len(lengths) * rounded if batching.padded else sum(lengths)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[3, 5, 4], [9, 2], [1]]),
        ({"padded": False}, [[3, 5, 4], [9, 2, 1]]),
        ({"max_samples": 2}, [[3, 5], [4, 9], [2, 1]]),
        ({"multiple_of": 4}, [[3, 5], [4], [9], [2, 1]]),
    ],
)
def test_consecutive_samples_fill_a_budget_of_18(options: dict[str, Any], expected: list[list[int]]) -> None:
    groups, counters = groups_of(TokenBudget(18, **options), make_items([3, 5, 4, 9, 2, 1]))
    assert lengths_of(groups) == expected
    assert [group.complete for group in groups[:-1]] == [True] * (len(groups) - 1)
    assert groups[-1].complete == (options == {"max_samples": 2})
    assert counters == {}


@settings(max_examples=150, deadline=None)
@given(batching=budgets, lengths=lengths_lists)
def test_every_sample_comes_once_in_order_or_is_counted(batching: TokenBudget, lengths: list[int]) -> None:
    items = make_items(lengths)
    groups, counters = groups_of(batching, items)
    too_long = [length for length in lengths if length and cost_of(batching, [length]) > batching.max_tokens]
    left_out = too_long if batching.overflow == "drop" else []
    assert [item for group in groups for item in group.items] == [i for i, n in zip(items, lengths, strict=True) if n and n not in left_out]
    assert all([item.sample for item in group.items] == group.samples for group in groups)
    name = "dropped" if batching.overflow == "drop" else "alone"
    expected = {"empty_samples": lengths.count(0), f"{name}_samples": len(too_long), f"{name}_tokens": sum(too_long)}
    assert counters == {name: count for name, count in expected.items() if count}


@settings(max_examples=150, deadline=None)
@given(batching=budgets, lengths=lengths_lists)
def test_no_group_exceeds_its_limits_and_none_could_take_the_next_sample(batching: TokenBudget, lengths: list[int]) -> None:
    found = lengths_of(groups_of(batching, make_items(lengths))[0])
    for group in found:
        assert cost_of(batching, group) <= batching.max_tokens or len(group) == 1
        assert batching.max_samples is None or len(group) <= batching.max_samples
    for group, following in itertools.pairwise(found):
        is_too_much = cost_of(batching, [*group, following[0]]) > batching.max_tokens
        assert is_too_much or len(group) == batching.max_samples


def test_a_group_that_nothing_fits_any_more_does_not_wait_for_the_next_sample() -> None:
    batcher = TokenBudget(8, max_samples=3).start()
    emitted = [lengths_of(list(batcher.push(item))) for item in make_items([4, 4, 1, 1, 1, 3, 8])]
    assert emitted == [[], [[4, 4]], [], [], [[1, 1, 1]], [], [[3], [8]]]


@pytest.mark.parametrize("multiple_of", [1, 8])
def test_the_cost_is_what_the_collator_makes_of_it(multiple_of: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 300).tolist()
    batching = TokenBudget(256, multiple_of=multiple_of)
    collate = SftCollator(pad_token_id=0, pad_to_multiple_of=multiple_of)
    groups, _ = groups_of(batching, make_items(lengths))
    made = [collate([{**sample, "prompt_length": 0} for sample in group.samples])["input_ids"].size for group in groups]
    assert made == [cost_of(batching, group) for group in lengths_of(groups)]
    assert max(made) <= 256


@pytest.mark.parametrize(("overflow", "num_delivered"), [("alone", 900), ("drop", 899)])
def test_one_sample_over_the_budget_late_in_the_epoch_does_no_harm(overflow: Any, num_delivered: int) -> None:
    groups, counters = groups_of(TokenBudget(256, overflow=overflow), make_items([100] * 700 + [257] + [100] * 199))
    assert sum(len(group.items) for group in groups) == num_delivered
    name = "alone" if overflow == "alone" else "dropped"
    assert counters == {f"{name}_samples": 1, f"{name}_tokens": 257}


def test_a_sample_alone_keeps_its_place_in_the_order() -> None:
    groups, _ = groups_of(TokenBudget(8, overflow="alone"), make_items([2, 3, 20, 1, 30, 40]))
    assert lengths_of(groups) == [[2, 3], [20], [1], [30], [40]]
    assert all(group.complete for group in groups)


def test_overflow_error_names_the_record_and_keeps_the_buffer() -> None:
    batcher = TokenBudget(8).start()
    fits, too_long = make_items([3, 9])
    list(batcher.push(fits))
    before = batcher.state()
    with pytest.raises(BatchError, match=r"record shard\[1\], seq 1: TokenBudget: expected at most 8 tokens, got 9; shorten"):
        batcher.push(too_long)
    assert batcher.state() == before


def test_a_length_that_only_rounding_makes_too_long_overflows() -> None:
    groups, _ = groups_of(TokenBudget(100, multiple_of=64, overflow="alone"), make_items([64, 65]))
    assert lengths_of(groups) == [[64], [65]]
    with pytest.raises(BatchError, match=r"expected at most 64 tokens, got 65"):
        groups_of(TokenBudget(100, multiple_of=64), make_items([65]))


def test_a_length_that_preprocess_counted() -> None:
    items = [Item({"num_tokens": number, "pixels": np.zeros((2, 2))}, number, 0, ("shard", number)) for number in (4, 3, 2)]
    groups, _ = groups_of(TokenBudget(8, field="num_tokens"), items)
    assert [[item.seq for item in group.items] for group in groups] == [[4, 3], [2]]


def test_a_sample_of_another_length_is_refused_on_restore() -> None:
    batcher = TokenBudget(20).start()
    (item,) = make_items([3])
    list(batcher.push(item))
    with pytest.raises(ResumeError, match=r"seq 0: expected '2 tokens' \(this loader\), got '3 tokens' \(the state\)"):
        TokenBudget(20).start().restore(batcher.state(), {(0, 0): item._replace(sample={"input_ids": [1, 2]})})


def test_lognormal_lengths_fill_most_of_the_budget() -> None:
    lengths = np.minimum(np.random.default_rng(1).lognormal(5, 1, 5000).astype(int) + 1, 2048)
    groups, _ = groups_of(TokenBudget(16384, padded=False), make_items(lengths.tolist()))
    assert np.mean([sum(group) for group in lengths_of(groups)[:-1]]) > 0.95 * 16384


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, r"TokenBudget\(max_tokens=...\): expected an int >= 1, got 0"),
        ({"max_tokens": 2.0}, r"TokenBudget\(max_tokens=...\): expected an int >= 1, got 2.0"),
        ({"padded": 1}, r"TokenBudget\(padded=...\): expected True or False, got 1"),
        ({"max_samples": 0}, r"TokenBudget\(max_samples=...\): expected an int >= 1, got 0"),
        ({"multiple_of": 0}, r"TokenBudget\(multiple_of=...\): expected an int >= 1, got 0"),
        ({"multiple_of": 9}, r"TokenBudget\(multiple_of=...\): expected <= max_tokens=8, got 9; give what the collator pads to"),
        ({"multiple_of": 2, "padded": False}, r"expected 1 where padding does not count, got 2; leave it out, or set padded=True"),
        ({"overflow": "split"}, r"TokenBudget\(overflow=...\): expected one of 'error', 'drop', 'alone', got 'split'"),
        ({"field": ""}, r"TokenBudget\(field=...\): expected a field name, got ''"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenBudget(**{"max_tokens": 8, **options})


def test_options_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError, match="max_tokens"):
        TokenBudget(8).max_tokens = 3  # type: ignore[misc]
