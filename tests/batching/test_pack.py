from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.batching import Pack
from aioloader.errors import BatchError, ConfigError, ResumeError
from aioloader.protocols import Group, Item
from tests.batching.pack_cases import groups_of, make_items, rows_of


def one(sample: Any) -> Item:
    return Item(sample, 5, 0, ("shard", 3))


def tokens_of(groups: Sequence[Group], field: str = "input_ids") -> list[int]:
    return [int(token) for row in rows_of(groups) for piece in row.pieces for token in piece[field]]


def test_documents_are_cut_at_row_ends() -> None:
    groups, _ = groups_of(Pack(6, rows=2), make_items([4, 7, 2, 3]))
    assert [[[list(piece["input_ids"]) for piece in row.pieces] for row in group.samples] for group in groups] == [
        [[[0, 1, 2, 3], [4, 5]], [[6, 7, 8, 9, 10], [11]]],
        [[[12], [13, 14, 15]]],
    ]
    assert [list(row.starts) for row in rows_of(groups)] == [[0, 0], [2, 0], [1, 0]]
    assert [row.length for row in rows_of(groups)] == [6, 6, 4]
    assert [[item.seq for item in group.items] for group in groups] == [[0, 1, 2], [2, 3]]
    assert [group.complete for group in groups] == [True, False]


def test_a_long_document_fills_several_groups_with_exact_state_between() -> None:
    batcher = Pack(4).start()
    (item,) = make_items([11])
    spans = [batcher.state()["spans"] for _ in batcher.push(item)]
    assert spans == [[[0, 0, 4, 11]], [[0, 0, 8, 11]]]
    (rest,) = batcher.finish()
    assert rest.samples[0].length == 3
    assert batcher.state()["spans"] == []


def test_pieces_are_views_of_the_samples_arrays() -> None:
    (item,) = make_items([10])
    groups, _ = groups_of(Pack(4), [item])
    pieces = [row.pieces[0]["input_ids"] for row in rows_of(groups)]
    assert all(np.shares_memory(piece, item.sample["input_ids"]) for piece in pieces)


def test_an_uncut_sample_is_the_piece_itself() -> None:
    (item,) = make_items([4])
    groups, _ = groups_of(Pack(4), [item])
    assert rows_of(groups)[0].pieces[0] is item.sample


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 25), max_size=20),
    seq_len=st.integers(1, 12),
    rows=st.integers(1, 4),
    overflow=st.sampled_from(["split", "truncate", "drop"]),
)
def test_out_plus_reported_is_in(lengths: list[int], seq_len: int, rows: int, overflow: Any) -> None:
    items = make_items(lengths)
    groups, counters = groups_of(Pack(seq_len, rows, overflow=overflow), items)
    longest_kept = {"split": max(lengths, default=0), "truncate": seq_len, "drop": 0}[overflow]
    documents = [item.sample["input_ids"].tolist() for item in items]
    kept = [tokens if len(tokens) <= seq_len else tokens[:longest_kept] for tokens in documents]
    assert tokens_of(groups) == list(itertools.chain(*kept))
    assert len(tokens_of(groups)) + counters["truncated_tokens"] + counters["dropped_tokens"] == sum(lengths)
    assert counters["packed_tokens"] == len(tokens_of(groups))
    num_long = sum(length > seq_len for length in lengths)
    assert counters["truncated_samples"] == (num_long if overflow == "truncate" else 0)
    assert counters["dropped_samples"] == (num_long if overflow == "drop" else 0)
    assert counters["empty_samples"] == lengths.count(0)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 25), max_size=20), seq_len=st.integers(1, 12), rows=st.integers(1, 4))
def test_rows_are_full_but_the_last(lengths: list[int], seq_len: int, rows: int) -> None:
    groups, _ = groups_of(Pack(seq_len, rows), make_items(lengths))
    packed = rows_of(groups)
    assert all(row.length == seq_len for row in packed[:-1])
    assert all(len(group.samples) == rows for group in groups if group.complete)
    assert all(sum(len(piece["input_ids"]) for piece in row.pieces) == row.length for row in packed)
    assert all(len(piece["input_ids"]) for row in packed for piece in row.pieces)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 25), max_size=20), seq_len=st.integers(1, 12), rows=st.integers(1, 4))
def test_starts_and_items_tell_where_each_piece_comes_from(lengths: list[int], seq_len: int, rows: int) -> None:
    for group in groups_of(Pack(seq_len, rows), make_items(lengths))[0]:
        by_first_token = {int(item.sample["input_ids"][0]): item for item in group.items}
        found = []
        for row in group.samples:
            for piece, start in zip(row.pieces, row.starts, strict=True):
                item = by_first_token[int(piece["input_ids"][0]) - start]
                assert piece["input_ids"].tolist() == item.sample["input_ids"][start : start + len(piece["input_ids"])].tolist()
                found.append(item.ref)
        assert list(dict.fromkeys(found)) == [item.ref for item in group.items]


@pytest.mark.parametrize(
    ("overflow", "out", "reported"),
    [
        ("split", 15, {}),
        ("truncate", 10, {"truncated_samples": 1, "truncated_tokens": 5}),
        ("drop", 6, {"dropped_samples": 1, "dropped_tokens": 9}),
    ],
)
def test_documents_longer_than_a_row(overflow: Any, out: int, reported: dict[str, int]) -> None:
    groups, counters = groups_of(Pack(4, overflow=overflow), make_items([9, 2, 3, 1]))
    assert len(tokens_of(groups)) == out
    assert {name: count for name, count in counters.items() if count and not name.startswith(("packed", "cut"))} == reported


def test_overflow_error_names_the_document_and_keeps_the_buffer() -> None:
    batcher = Pack(4, overflow="error").start()
    fits, too_long = make_items([3, 9])
    list(batcher.push(fits))
    before = batcher.state()
    with pytest.raises(BatchError, match=r"record shard\[1\], seq 1: Pack: expected at most seq_len=4 tokens, got 9; shorten") as raised:
        batcher.push(too_long)
    assert (raised.value.seq, raised.value.record) == (1, ("shard", 1))
    assert batcher.state() == before


def test_each_epoch_delivers_every_document_once() -> None:
    batcher = Pack(8).start()
    for epoch in range(3):
        items = make_items([5] * 13, first_seq=13 * epoch)
        groups = [group for item in items for group in batcher.push(item)] + list(batcher.finish())
        assert tokens_of(groups) == list(range(65))
        assert batcher.state()["spans"] == []


def test_rows_their_tokens_and_documents_are_counted() -> None:
    groups, counters = groups_of(Pack(6, rows=2), make_items([4, 7, 2, 3]))
    # Rows aaaabb | bbbbbc | cddd: the second and the third document are cut.
    assert {name: counters[name] for name in ("packed_rows", "packed_tokens", "packed_pieces", "cut_documents")} == {
        "packed_rows": len(rows_of(groups)),
        "packed_tokens": 16,
        "packed_pieces": 6,
        "cut_documents": 2,
    }


def test_a_document_that_spans_three_rows_is_cut_once() -> None:
    assert groups_of(Pack(4), make_items([11]))[1]["cut_documents"] == 1


@pytest.mark.parametrize("make", [list, np.array])
def test_a_separator_ends_every_document(make: Any) -> None:
    groups, _ = groups_of(Pack(8, separator=99), [one({"input_ids": make(tokens)}) for tokens in ([1, 2], [], [3], [4, 5])])
    assert [[list(piece["input_ids"]) for piece in row.pieces] for row in rows_of(groups)] == [[[1, 2, 99], [3, 99], [4, 5, 99]]]


@pytest.mark.parametrize("make", [list, np.array])
@pytest.mark.parametrize(
    ("fields", "ended"),
    [
        ({"labels": [1, 2, 3]}, {"labels": [1, 2, 3, 98, 99]}),
        ({"labels": [-100, 2, -100]}, {"labels": [-100, 2, -100, -100, -100]}),
        ({"loss_mask": [0, 1, 1]}, {"loss_mask": [0, 1, 1, 1, 1]}),
        ({"loss_mask": [1, 1, 0]}, {"loss_mask": [1, 1, 0, 0, 0]}),
    ],
)
def test_a_separator_is_a_target_if_the_documents_last_token_is(make: Any, fields: dict[str, Any], ended: dict[str, Any]) -> None:
    sample = {name: make(values) for name, values in {"input_ids": [1, 2, 3], **fields}.items()}
    groups, _ = groups_of(Pack(8, separator=(98, 99)), [one(sample)])
    (piece,) = rows_of(groups)[0].pieces
    assert {name: list(values) for name, values in piece.items()} == {"input_ids": [1, 2, 3, 98, 99], **ended}


def test_a_separator_that_the_tokens_dtype_cannot_hold_is_kept_whole() -> None:
    groups, _ = groups_of(Pack(4, separator=100_000), [one({"input_ids": np.array([1, 2], dtype=np.uint16)})])
    assert rows_of(groups)[0].pieces[0]["input_ids"].tolist() == [1, 2, 100_000]


def test_a_separator_counts_as_a_token_and_the_sample_is_not_written_to() -> None:
    sample = {"input_ids": [1, 2, 3, 4]}
    groups, counters = groups_of(Pack(4, separator=99, overflow="truncate"), [one(sample)])
    assert tokens_of(groups) == [1, 2, 3, 4]
    assert (counters["truncated_samples"], counters["truncated_tokens"]) == (1, 1)
    assert sample == {"input_ids": [1, 2, 3, 4]}


def test_all_fields_are_cut_alike() -> None:
    sample = {"input_ids": [1, 2, 3, 4, 5], "loss_mask": np.array([0, 0, 1, 1, 1]), "labels": (6, 7, 8, 9, 10)}
    groups, _ = groups_of(Pack(3), [one(sample)])
    first, second = (row.pieces[0] for row in rows_of(groups))
    assert {name: list(values) for name, values in first.items()} == {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "labels": [6, 7, 8]}
    assert {name: list(values) for name, values in second.items()} == {"input_ids": [4, 5], "loss_mask": [1, 1], "labels": [9, 10]}


def test_rows_name_the_tokens_input_ids_whatever_field_they_came_in() -> None:
    sample = {"text_tokens": [1, 2], "input_ids": [8, 9], "labels": [3, 4]}
    groups, _ = groups_of(Pack(2, field="text_tokens"), [one(sample)])
    assert rows_of(groups)[0].pieces[0] == {"input_ids": [1, 2], "labels": [3, 4]}


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([1, 2], r"expected a mapping with the 1-D field 'input_ids', got list; return \{'input_ids': tokens\}"),
        (None, r"expected a mapping .* got NoneType"),
        ({"text": "ab"}, r"expected the field 'input_ids', got fields \['text'\]; add it"),
        ({"input_ids": [1, 2], "labels": [1]}, r"of one length, got 'input_ids': 2 tokens, 'labels': 1 tokens; align"),
        ({"input_ids": [1, 2], "text": "ab"}, r"'text': str; align or remove"),
        ({"input_ids": [1, 2], "prompt_length": 1}, r"'prompt_length': int; align or remove"),
        ({"input_ids": np.zeros((1, 2), dtype=int)}, r"'input_ids': ndarray of shape \(1, 2\); align"),
        ({"input_ids": np.array(3)}, r"'input_ids': ndarray of shape \(\); align"),
        ({"input_ids": 3}, r"'input_ids': int; align"),
    ],
)
def test_a_malformed_sample_is_refused_by_name(sample: Any, message: str) -> None:
    batcher = Pack(4).start()
    with pytest.raises(BatchError, match=rf"record shard\[3\], seq 5: Pack: .*{message}"):
        batcher.push(one(sample))
    assert batcher.state() == Pack(4).start().state()


def test_a_document_that_became_shorter_is_refused_on_restore() -> None:
    batcher = Pack(4).start()
    list(batcher.push(one({"input_ids": [1, 2, 3]})))
    with pytest.raises(ResumeError, match=r"seq 5: expected '2 tokens' \(this loader\), got '>= 3 tokens' \(the state\)"):
        Pack(4).start().restore(batcher.state(), {(5, 0): one({"input_ids": [1, 2]})})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, r"Pack\(seq_len=...\): expected an int >= 1, got 0"),
        ({"rows": True}, r"Pack\(rows=...\): expected an int >= 1, got True"),
        ({"strategy": "next_fit"}, r"Pack\(strategy=...\): expected one of 'greedy', 'first_fit', 'best_fit', got 'next_fit'"),
        ({"open_bins": 4}, r"Pack\(open_bins=...\): expected None with strategy='greedy', got 4; leave it out"),
        ({"max_age": 4}, r"Pack\(max_age=...\): expected None with strategy='greedy', got 4; leave it out"),
        ({"strategy": "best_fit", "open_bins": 0}, r"Pack\(open_bins=...\): expected an int >= 1, got 0"),
        ({"strategy": "best_fit", "max_age": 0.5}, r"Pack\(max_age=...\): expected an int >= 1, got 0.5"),
        ({"separator": "</s>"}, r"Pack\(separator=...\): expected a token id, a tuple of them, or None, got '</s>'; give the id"),
        ({"separator": (1, True)}, r"Pack\(separator=...\): expected a token id, a tuple of them, or None, got \(1, True\)"),
        ({"separator": ()}, r"Pack\(separator=...\): expected a token id, a tuple of them, or None, got \(\)"),
        ({"overflow": "wrap"}, r"expected one of 'split', 'truncate', 'drop', 'error', got 'wrap'"),
        ({"field": ""}, r"Pack\(field=...\): expected a field name, got ''"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pack(**{"seq_len": 8, **options})
