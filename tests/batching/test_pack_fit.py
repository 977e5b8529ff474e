from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.batching import Pack
from aioloader.batching.bins import pack_lengths
from aioloader.errors import BatchError
from aioloader.protocols import Batcher, Group
from tests.batching.pack_cases import groups_of, make_items, rows_of

properties = settings(max_examples=50, deadline=None)
fits = st.sampled_from(["first_fit", "best_fit"])


def pieces_of(groups: Sequence[Group]) -> list[list[int]]:
    return [piece["input_ids"].tolist() for row in rows_of(groups) for piece in row.pieces]


def test_a_row_takes_the_oldest_and_what_fills_it() -> None:
    # Held when the first row closes: 4, 5, 2, 3, 6 (two rows' worth of tokens).
    groups, counters = groups_of(Pack(10, strategy="best_fit", open_bins=2), make_items([4, 5, 2, 3, 6, 1]))
    assert [[len(piece["input_ids"]) for piece in row.pieces] for row in rows_of(groups)] == [[4, 6], [5, 2, 3], [1]]
    assert [[item.seq for item in group.items] for group in groups] == [[0, 4], [1, 2, 3], [5]]
    assert [list(row.starts) for row in rows_of(groups)] == [[0, 0], [0, 0, 0], [0]]
    assert [group.complete for group in groups] == [True, True, True]
    assert [counters[name] for name in ("packed_rows", "packed_tokens", "packed_pieces", "cut_documents")] == [3, 21, 6, 0]


def test_an_epochs_last_group_is_complete_only_with_all_its_rows() -> None:
    groups, _ = groups_of(Pack(10, rows=2, strategy="best_fit", open_bins=2), make_items([6] * 5))
    assert [(len(group.samples), group.complete) for group in groups] == [(2, True), (2, True), (1, False)]


@properties
@given(
    lengths=st.lists(st.integers(0, 45), max_size=40),
    rows=st.integers(1, 3),
    strategy=fits,
    overflow=st.sampled_from(["split", "truncate", "drop"]),
    open_bins=st.integers(1, 5),
    max_age=st.none() | st.integers(1, 9),
)
def test_no_document_that_fits_is_cut_and_no_token_is_lost(
    lengths: list[int], rows: int, strategy: Any, overflow: Any, open_bins: int, max_age: int | None
) -> None:
    seq_len = 12
    items = make_items(lengths)
    batching = Pack(seq_len, rows, strategy=strategy, overflow=overflow, open_bins=open_bins, max_age=max_age)
    groups, counters = groups_of(batching, items)
    documents = [item.sample["input_ids"].tolist() for item in items if len(item.sample["input_ids"])]
    expected: list[list[int]] = []
    for document in documents:
        if len(document) <= seq_len:
            expected.append(document)
        elif overflow == "truncate":
            expected.append(document[:seq_len])
        elif overflow == "split":
            expected += [document[start : start + seq_len] for start in range(0, len(document), seq_len)]
    assert sorted(pieces_of(groups)) == sorted(expected)
    num_packed = sum(map(len, expected))
    num_long = sum(length > seq_len for length in lengths)
    assert num_packed + counters["truncated_tokens"] + counters["dropped_tokens"] == sum(lengths)
    assert (counters["packed_rows"], counters["packed_tokens"]) == (len(rows_of(groups)), num_packed)
    assert counters["packed_pieces"] == len(expected)
    assert counters["cut_documents"] == (num_long if overflow == "split" else 0)
    assert all(row.length == sum(len(piece["input_ids"]) for piece in row.pieces) <= seq_len for row in rows_of(groups))


@properties
@given(lengths=st.lists(st.integers(1, 12), max_size=60), strategy=fits, open_bins=st.none() | st.integers(1, 6))
def test_rows_are_those_of_the_lengths_alone(lengths: list[int], strategy: Any, open_bins: int | None) -> None:
    groups, _ = groups_of(Pack(12, strategy=strategy, open_bins=open_bins), make_items(lengths))
    # A document as long as a row has one of its own at once.
    shorter = [number for number, length in enumerate(lengths) if length < 12]
    expected = [
        [shorter[at] for at in row]
        for row in pack_lengths([lengths[number] for number in shorter], 12, strategy=strategy, open_bins=open_bins)
    ]
    assert [[item.seq for item in group.items] for group in groups if group.samples[0].pieces[0]["input_ids"].size < 12] == expected


def test_a_long_document_gives_full_rows_and_a_rest_that_is_packed() -> None:
    groups, _ = groups_of(Pack(10, strategy="best_fit", open_bins=2), make_items([4, 27, 9, 3]))
    assert [[len(piece["input_ids"]) for piece in row.pieces] for row in rows_of(groups)] == [[10], [10], [4], [7, 3], [9]]
    assert [list(row.starts) for row in rows_of(groups)] == [[0], [10], [0], [20, 0], [0]]


def test_state_is_exact_between_the_groups_of_a_long_document() -> None:
    batcher = Pack(10, strategy="best_fit").start()
    (item,) = make_items([34])
    states = [json.loads(json.dumps(batcher.state())) for _ in batcher.push(item)]
    assert [state["rows"] for state in states] == [[[[0, 0, 10, 20]], [[0, 0, 20, 30]]], [[[0, 0, 20, 30]]], []]
    assert all(state["spans"] == [[0, 0, 30, 34]] for state in states)
    assert [state["counters"]["packed_rows"] for state in states] == [1, 2, 3]


def test_restored_ages_close_rows_at_the_same_document() -> None:
    items = make_items([9, 1, 1, 1, 1, 1, 1])
    batching = Pack(100, strategy="best_fit", max_age=5)
    batcher: Batcher = batching.start()
    num_groups = []
    for number, item in enumerate(items):
        num_groups.append(len(list(batcher.push(item))))
        state = json.loads(json.dumps(batcher.state()))
        batcher = batching.start()
        batcher.restore(state, {item.ref: item for item in items[: number + 1]})
    assert num_groups == [0, 0, 0, 0, 0, 1, 0]


def test_documents_that_fill_rows_alone_age_those_that_wait() -> None:
    batcher = Pack(10, strategy="best_fit", max_age=3).start()
    assert [len(list(batcher.push(item))) for item in make_items([4, 10, 20, 10])] == [0, 1, 2, 2]
    assert batcher.state()["spans"] == []


def test_the_state_by_default_is_small() -> None:
    lengths = np.random.default_rng(3).lognormal(6.2, 1.0, 2000).astype(int).clip(1, 2048).tolist()
    batcher = Pack(2048, strategy="best_fit").start()
    sizes = [len(json.dumps(batcher.state())) for item in make_items(lengths, first_seq=10**8) for _ in batcher.push(item)]
    assert len(sizes) > 500
    assert max(sizes) < 2600


def test_overflow_error_names_the_document_and_keeps_the_buffer() -> None:
    batcher = Pack(4, strategy="best_fit", overflow="error").start()
    fits, too_long = make_items([3, 9])
    list(batcher.push(fits))
    before = batcher.state()
    with pytest.raises(BatchError, match=r"record shard\[1\], seq 1: Pack: expected at most seq_len=4 tokens, got 9; shorten"):
        batcher.push(too_long)
    assert batcher.state() == before


def test_each_epoch_delivers_every_document_once_and_ends_empty() -> None:
    batcher = Pack(8, rows=2, strategy="best_fit").start()
    for epoch in range(3):
        items = make_items([5] * 13, first_seq=13 * epoch)
        groups = [group for item in items for group in batcher.push(item)] + list(batcher.finish())
        assert sorted(itertools.chain(*pieces_of(groups))) == list(range(65))
        assert (batcher.state()["rows"], batcher.state()["spans"], batcher.state()["ages"]) == ([], [], [])


def test_separators_count_as_tokens_of_their_documents() -> None:
    groups, counters = groups_of(Pack(6, strategy="best_fit", open_bins=1, separator=99), make_items([3, 1, 5]))
    assert pieces_of(groups) == [[0, 1, 2, 99], [3, 99], [4, 5, 6, 7, 8, 99]]
    assert (counters["packed_rows"], counters["packed_tokens"]) == (2, 12)
