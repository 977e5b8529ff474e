from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.collate import PretrainCollator, count_tokens
from aioloader.errors import BatchError, ConfigError
from aioloader.protocols import PackedRow

IGN = -100


def row(*documents: Any, seq_len: int) -> PackedRow:
    """Return a row of documents, each a list of tokens or a mapping of fields."""
    pieces = [document if isinstance(document, dict) else {"input_ids": document} for document in documents]
    length = sum(len(piece["input_ids"]) for piece in pieces if np.ndim(piece.get("input_ids", 0)))
    return PackedRow(pieces, [0] * len(pieces), length, seq_len)


def collated(samples: Sequence[Any], **options: Any) -> dict[str, Any]:
    """Return the arrays as lists."""
    return {name: array.tolist() for name, array in PretrainCollator(**options)(samples).items()}


def test_packed_rows() -> None:
    rows = [row([1, 2, 3], np.array([4, 5]), seq_len=7), row([6, 7, 8, 9, 10, 11, 12], seq_len=7)]
    assert collated(rows) == {
        "input_ids": [[1, 2, 3, 4, 5, 0, 0], [6, 7, 8, 9, 10, 11, 12]],
        "labels": [[IGN, 2, 3, IGN, 5, IGN, IGN], [IGN, 7, 8, 9, 10, 11, 12]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]],
        "document_ids": [[0, 0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0, 0]],
        "cu_seqlens": [0, 3, 5, 7, 14],
        "max_seqlen": 7,
    }


def test_dtypes_and_shapes_of_packed_rows() -> None:
    batch = PretrainCollator()([row(np.array([1, 2], dtype=np.uint16), seq_len=4)] * 3)
    assert {name: (str(array.dtype), array.shape) for name, array in batch.items()} == {
        "input_ids": ("int64", (3, 4)),
        "labels": ("int64", (3, 4)),
        "position_ids": ("int64", (3, 4)),
        "document_ids": ("int32", (3, 4)),
        "cu_seqlens": ("int32", (7,)),
        "max_seqlen": ("int32", ()),
    }


def test_no_token_predicts_across_a_border() -> None:
    assert collated([row([1, 2, 3], [4, 5], seq_len=5)], shift_labels=True)["labels"] == [[2, 3, IGN, 5, IGN]]


def test_shifted_labels_do_not_reach_into_the_next_row() -> None:
    rows = [row([1, 2, 3], seq_len=3), row([4, 5], seq_len=3)]
    assert collated(rows, shift_labels=True)["labels"] == [[2, 3, IGN], [5, IGN, IGN]]


def test_documents_with_and_without_a_loss_mask() -> None:
    # The row's mask is [1, 1, 1, 0, 1]; of those left, tokens 0 and 3 begin a document.
    packed = row([1, 2, 3], {"input_ids": [4, 5], "loss_mask": [0, 1]}, seq_len=5)
    assert collated([packed])["labels"] == [[IGN, 2, 3, IGN, 5]]


def test_a_loss_mask_inside_a_document_and_its_own_labels() -> None:
    documents = ({"input_ids": [1, 2, 3, 4], "loss_mask": [True, True, False, True]}, {"input_ids": [5, 6], "labels": [7, 8]})
    assert collated([row(*documents, seq_len=6)])["labels"] == [[IGN, 2, IGN, 4, IGN, 8]]


def test_own_labels_and_a_loss_mask_together() -> None:
    document = {"input_ids": [1, 2, 3], "labels": [4, 5, 6], "loss_mask": [1, 0, 1]}
    assert collated([row(document, seq_len=3)])["labels"] == [[IGN, IGN, 6]]
    assert collated([document])["labels"] == [[IGN, IGN, 6]]


def test_chosen_padding_and_ignore_index() -> None:
    batch = collated([row([1, 2], seq_len=4)], pad_token_id=9, ignore_index=-1)
    assert batch["input_ids"] == [[1, 2, 9, 9]]
    assert batch["labels"] == [[-1, 2, -1, -1]]


def test_empty_pieces_make_no_segment() -> None:
    batch = collated([row([], [1, 2], [], [3], seq_len=3), row([], seq_len=3)])
    assert batch["cu_seqlens"] == [0, 2, 3, 6]
    assert batch["document_ids"] == [[0, 0, 1], [-1, -1, -1]]


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=4), room=st.integers(0, 3))
def test_segments_cover_the_tokens_and_labels_stay_inside_them(rows: list[list[int]], room: int) -> None:
    seq_len = max(1, max(map(sum, rows)) + room)
    samples = [row(*(np.arange(length) + 10 for length in lengths), seq_len=seq_len) for lengths in rows]
    unshifted, shifted = PretrainCollator()(samples), PretrainCollator(shift_labels=True)(samples)
    borders = unshifted["cu_seqlens"]
    assert borders[0] == 0
    assert borders[-1] == len(rows) * seq_len
    assert (np.diff(borders) > 0).all()
    assert unshifted["max_seqlen"] == np.diff(borders).max()
    ids, positions = unshifted["document_ids"], unshifted["position_ids"]
    assert (positions.ravel()[borders[:-1]] == 0).all()
    assert ((unshifted["input_ids"] == positions + 10) == (ids >= 0)).all()
    # A target's input and the target itself are neighbours in one document.
    targets, inputs = np.nonzero(shifted["labels"] != IGN), shifted["input_ids"]
    after = (targets[0], targets[1] + 1)
    assert (shifted["labels"][targets] == inputs[after]).all()
    assert (ids[targets] == ids[after]).all()
    num_targets = sum(length - 1 for lengths in rows for length in lengths)
    assert count_tokens(unshifted).num_targets == count_tokens(shifted).num_targets == num_targets
    assert count_tokens(unshifted)[:2] == (sum(map(sum, rows)), len(rows) * seq_len - sum(map(sum, rows)))


def test_plain_samples_of_one_length_are_stacked() -> None:
    batch = PretrainCollator()([{"input_ids": np.array([1, 2, 3])}, {"input_ids": [4, 5, 6]}])
    assert {name: array.tolist() for name, array in batch.items()} == {
        "input_ids": [[1, 2, 3], [4, 5, 6]],
        "labels": [[IGN, 2, 3], [IGN, 5, 6]],
        "attention_mask": [[1, 1, 1], [1, 1, 1]],
    }
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int64)}


def test_plain_samples_are_padded_to_the_longest() -> None:
    samples = [np.array([1, 2, 3], dtype=np.int32), [4], {"input_ids": []}]
    assert collated(samples, pad_token_id=9) == {
        "input_ids": [[1, 2, 3], [4, 9, 9], [9, 9, 9]],
        "labels": [[IGN, 2, 3], [IGN, IGN, IGN], [IGN, IGN, IGN]],
        "attention_mask": [[1, 1, 1], [1, 0, 0], [0, 0, 0]],
    }


def test_plain_samples_shifted() -> None:
    assert collated([[1, 2, 3], [4, 5]], shift_labels=True)["labels"] == [[2, 3, IGN], [5, IGN, IGN]]


def test_the_samples_are_not_written_to() -> None:
    tokens = np.array([1, 2, 3])
    tokens.flags.writeable = False
    for sample in (tokens, row(tokens, seq_len=3)):
        batch = PretrainCollator()([sample])
        assert all(not np.shares_memory(array, tokens) for array in batch.values())
        assert batch["labels"].tolist() == [[IGN, 2, 3]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], r"expected at least one sample, got none"),
        ([[1], "text"], r"sample 1: expected a 1-D integer array, got <U4\[\]"),
        ([{"tokens": [1]}], r"sample 0: expected the field 'input_ids', got fields \['tokens'\]; add it"),
        ([{"input_ids": [1.5]}], r"sample 0\['input_ids'\]: expected a 1-D integer array, got float64\[1\]; return one flat row"),
        ([{"input_ids": [[1, 2]]}], r"got int64\[1, 2\]; return one flat row"),
        ([{"input_ids": [[1], [2, 3]]}], r"got list \(.*\); convert it"),
        ([{"input_ids": [1, 2], "labels": [1]}], r"sample 0\['labels'\]: expected 2 values, one per token, got 1; align"),
        ([row({"input_ids": [1, 2], "loss_mask": [1]}, seq_len=4)], r"sample 0, piece 0\['loss_mask'\]: expected 2 values"),
        ([row([1], {"ids": [1]}, seq_len=4)], r"sample 0, piece 1: expected the field 'input_ids'"),
        ([row([1, 2], seq_len=4), [1, 2]], r"sample 1: expected a PackedRow like sample 0, got list; give packed rows or plain"),
        ([[1, 2], row([1, 2], seq_len=4)], r"sample 1: expected a plain sample, got a PackedRow"),
        ([row([1], seq_len=4), row([1], seq_len=8)], r"sample 1: expected seq_len=4 like sample 0, got 8; pack all rows"),
        ([row([1, 2], [3], seq_len=2)], r"sample 0: expected at most seq_len=2 tokens in its pieces, got 3; cut them"),
    ],
)
def test_malformed_samples_are_refused_by_name(samples: list[Any], message: str) -> None:
    with pytest.raises(BatchError, match=rf"PretrainCollator: .*{message}"):
        PretrainCollator()(samples)


@pytest.mark.parametrize("options", [{"pad_token_id": None}, {"ignore_index": 1.0}, {"shift_labels": 1}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"PretrainCollator\({next(iter(options))}=...\): expected"):
        PretrainCollator(**options)


def test_options_travel_compare_and_identify_themselves() -> None:
    collator = PretrainCollator(pad_token_id=3)
    again = pickle.loads(pickle.dumps(collator))
    assert again == collator
    assert hash(again) == hash(collator)
    assert json.loads(json.dumps(again.fingerprint())) == collator.fingerprint() != PretrainCollator().fingerprint()
