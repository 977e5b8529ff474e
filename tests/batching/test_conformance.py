"""What every batching promises: groups that depend on the items only, and state by reference that resumes at any group."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.batching import FixedBatch, Pack
from aioloader.batching.bucket import Bucket
from aioloader.batching.token_budget import TokenBudget
from aioloader.protocols import Batcher, Batching, Group, Item, Json, PackedRow

BATCHINGS: list[Batching] = [
    FixedBatch(1),
    FixedBatch(3),
    Pack(4),
    Pack(3, rows=2),
    Pack(5, rows=3, overflow="truncate"),
    Pack(5, rows=2, overflow="drop"),
    Pack(100, overflow="error"),
    Pack(4, rows=2, field="tokens"),
    Pack(4, rows=2, separator=(7, 8)),
    Pack(5, rows=2, strategy="best_fit", open_bins=2),
    Pack(6, strategy="best_fit", max_age=3),
    Pack(7, rows=2, strategy="best_fit", open_bins=3, separator=9, overflow="truncate"),
    Pack(8, rows=3, strategy="first_fit", open_bins=1, overflow="drop", field="tokens"),
    TokenBudget(14),
    TokenBudget(20, max_samples=3, multiple_of=4),
    TokenBudget(20, padded=False),
    TokenBudget(8, overflow="drop", multiple_of=3),
    TokenBudget(8, overflow="alone", padded=False, field="tokens"),
    Bucket([4, 8, 14], batch_size=2),
    Bucket([2, 14], batch_size=[3, 2], max_age=4),
    Bucket([3, 6, 9, 12, 15], batch_size=3, lookahead=4),
    Bucket([3, 7], max_tokens=14, overflow="drop", field="tokens"),
    Bucket([3, 7], max_tokens=9, overflow="alone", max_age=3),
]
properties = settings(max_examples=30, deadline=None)
every_batching = pytest.mark.parametrize("batching", BATCHINGS, ids=repr)


class Step(NamedTuple):
    """One group in comparable form, the state as of it, and how many items had been pushed by then."""

    group: object
    state: str
    num_pushed: int


def view(group: Group) -> object:
    def plain(sample: Any) -> object:
        if isinstance(sample, PackedRow):
            return [plain(piece) for piece in sample.pieces], list(sample.starts), sample.length, sample.seq_len
        return {name: list(values) for name, values in sample.items()}

    return [plain(sample) for sample in group.samples], [(item.ref, item.record) for item in group.items], group.complete


def drive(batcher: Batcher, items: Sequence[Item], num_pushed: int = 0) -> Iterator[Step]:
    """Yield a step for each group: those ready already, those of `items[num_pushed:]`, and those of the end."""

    def step(group: Group) -> Step:
        return Step(view(group), json.dumps(batcher.state()), num_pushed)

    yield from map(step, batcher.ready())
    for item in items[num_pushed:]:
        num_pushed += 1
        yield from map(step, batcher.push(item))
    yield from map(step, batcher.finish())


def restored(batching: Batching, state: Json, items: Sequence[Item]) -> Batcher:
    """Return a fresh batcher with this state; the items it refers to are made anew, as after a restart."""
    batcher = batching.start()
    again = {item.ref: copy.deepcopy(item) for item in items}
    batcher.restore(state, {ref: again[ref] for ref in batcher.refs(state)})
    return batcher


def shape(state: Json) -> Json:
    """Return a state without its numbers and the lengths of its lists."""
    return {key: shape(value) for key, value in state.items()} if isinstance(state, dict) else type(state).__name__


def make_items(lengths: Sequence[int], make: Callable[[list[int]], Any] = list, first_seq: int = 0) -> list[Item]:
    """Return one item per length, with tokens counted through; every third record makes two samples."""
    items, token = [], 0
    seq, sub = first_seq, 0
    for number, length in enumerate(lengths):
        tokens = list(range(token, token + length))
        token += length
        sample = {"input_ids": make(tokens), "tokens": make(tokens), "loss_mask": make([value % 2 for value in tokens])}
        items.append(Item(sample, seq, sub, ("shard", seq)))
        seq, sub = (seq, 1) if sub == 0 and number % 3 == 0 else (seq + 1, 0)
    return items


lengths_lists = st.lists(st.integers(0, 14), max_size=14)
makers = st.sampled_from([list, np.array])


@every_batching
@properties
@given(lengths=lengths_lists, make=makers)
def test_resume_at_any_group_gives_the_same_groups_and_states(batching: Batching, lengths: list[int], make: Callable[..., Any]) -> None:
    items = make_items(lengths, make)
    steps = list(drive(batching.start(), items))
    for index, step in enumerate(steps):
        batcher = restored(batching, json.loads(step.state), items[: step.num_pushed])
        assert json.dumps(batcher.state()) == step.state
        assert list(drive(batcher, items, step.num_pushed)) == steps[index + 1 :]


@every_batching
@properties
@given(lengths=lengths_lists)
def test_resume_between_groups_gives_the_same_groups(batching: Batching, lengths: list[int]) -> None:
    items = make_items(lengths)
    expected = [step.group for step in drive(batching.start(), items)]
    batcher = batching.start()
    groups: list[object] = []
    for num_pushed, item in enumerate(items, start=1):
        groups += map(view, batcher.push(item))
        batcher = restored(batching, json.loads(json.dumps(batcher.state())), items[:num_pushed])
    assert groups + [view(group) for group in batcher.finish()] == expected


@every_batching
@properties
@given(lengths=lengths_lists)
def test_an_abandoned_push_goes_on_with_the_next_call(batching: Batching, lengths: list[int]) -> None:
    items = make_items(lengths)
    expected = [step.group for step in drive(batching.start(), items)]
    batcher = batching.start()
    groups: list[object] = []
    for item in items:
        groups += map(view, itertools.islice(batcher.push(item), 1))
    assert groups + [view(group) for group in batcher.finish()] == expected


@every_batching
@properties
@given(lengths=lengths_lists)
def test_finish_starts_afresh(batching: Batching, lengths: list[int]) -> None:
    items = make_items(lengths)
    batcher = batching.start()
    first = [step.group for step in drive(batcher, items)]
    assert list(batcher.finish()) == []
    assert not list(batcher.refs(batcher.state()))
    assert [step.group for step in drive(batcher, items)] == first


@every_batching
@properties
@given(lengths=lengths_lists)
def test_only_what_is_left_at_the_end_is_incomplete_and_items_stay_in_order(batching: Batching, lengths: list[int]) -> None:
    items = make_items(lengths)
    batcher = batching.start()
    groups = [group for item in items for group in batcher.push(item)]
    assert all(group.complete for group in groups)
    rest = list(batcher.finish())
    assert sum(not group.complete for group in rest) <= (len(batching.boundaries) if isinstance(batching, Bucket) else 1)
    is_fit = isinstance(batching, Pack) and batching.strategy != "greedy"  # any number of its rows counts as full
    assert is_fit or not any(group.complete for group in rest[-1:])
    for group in [*groups, *rest]:
        refs = [item.ref for item in group.items]
        assert refs
        assert len(refs) == len(set(refs))
        assert is_fit or refs == sorted(refs)


@every_batching
@properties
@given(lengths=lengths_lists)
def test_state_keeps_its_shape_and_holds_references_only(batching: Batching, lengths: list[int]) -> None:
    batcher = batching.start()
    first = shape(batcher.state())
    for item in make_items(lengths, np.array):
        for _ in batcher.push(item):
            assert shape(batcher.state()) == first
        state = batcher.state()
        assert json.loads(json.dumps(state)) == state
        assert len(list(batcher.refs(state))) == len(set(batcher.refs(state)))
    assert shape(batcher.state()) == first


@every_batching
@properties
@given(lengths=lengths_lists)
def test_counters_have_the_same_names_and_survive_resume(batching: Batching, lengths: list[int]) -> None:
    items = make_items(lengths)
    batcher = batching.start()
    assert batcher.counters().keys() >= FixedBatch(1).start().counters().keys()
    assert not any(batcher.counters().values())
    for item in items:
        list(batcher.push(item))
    assert restored(batching, json.loads(json.dumps(batcher.state())), items).counters() == batcher.counters()


@every_batching
def test_a_reference_that_is_not_made_again_is_refused(batching: Batching) -> None:
    batcher = batching.start()
    states = [batcher.state()]
    for item in make_items([2, 3, 2, 3, 2]):
        list(batcher.push(item))
        states.append(batcher.state())
    for state in states:
        if list(batcher.refs(state)):
            with pytest.raises(ValueError, match=r"the record with seq \d+: expected 'not produced again'.*\n.*preprocess function"):
                batching.start().restore(state, {})


@every_batching
def test_options_travel_compare_and_identify_themselves(batching: Batching) -> None:
    again = pickle.loads(pickle.dumps(batching))
    assert again == batching
    assert hash(again) == hash(batching)
    assert json.loads(json.dumps(batching.fingerprint())) == again.fingerprint()


def test_fingerprints_tell_the_batchings_apart() -> None:
    assert len({json.dumps(batching.fingerprint()) for batching in BATCHINGS}) == len(BATCHINGS)


@every_batching
def test_repr_shows_live_counts(batching: Batching) -> None:
    batcher = batching.start()
    before = repr(batcher)
    list(batcher.push(make_items([2])[0]))
    list(batcher.push(make_items([1])[0]))
    assert "0/" in before
    assert repr(batcher) != before or not list(batcher.refs(batcher.state()))
