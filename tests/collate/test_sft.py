from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.batching import Pack
from aioloader.collate import SftCollator, count_tokens
from aioloader.errors import BatchError, ConfigError
from aioloader.protocols import Item, PackedRow

IGN = -100


def row(*documents: dict[str, Any], seq_len: int) -> PackedRow:
    return PackedRow(documents, [0] * len(documents), sum(len(document["input_ids"]) for document in documents), seq_len)


def collated(samples: Sequence[Any], **options: Any) -> dict[str, Any]:
    """Return the arrays as lists."""
    return {name: array.tolist() for name, array in SftCollator(**{"pad_token_id": 0, **options})(samples).items()}


def test_three_ways_to_say_what_is_trained() -> None:
    samples = [
        {"input_ids": [1, 2, 3, 4], "prompt_length": 2},
        {"input_ids": np.array([5, 6, 7]), "loss_mask": [0, 1, 0]},
        {"input_ids": [8, 9], "labels": [IGN, 9]},
    ]
    assert collated(samples) == {
        "input_ids": [[1, 2, 3, 4], [5, 6, 7, 0], [8, 9, 0, 0]],
        "labels": [[IGN, IGN, 3, 4], [IGN, 6, IGN, IGN], [IGN, 9, IGN, IGN]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]],
    }


def test_dtypes_and_shapes() -> None:
    batch = SftCollator(pad_token_id=0)([{"input_ids": np.array([1, 2, 3], dtype=np.int32), "prompt_length": np.int64(1)}] * 2)
    assert {name: (str(array.dtype), array.shape) for name, array in batch.items()} == {
        "input_ids": ("int64", (2, 3)),
        "labels": ("int64", (2, 3)),
        "attention_mask": ("int64", (2, 3)),
    }


def test_packed_rows_keep_what_each_document_says_is_trained() -> None:
    first = {"input_ids": [1, 2, 3, 4], "loss_mask": [1, 0, 1, 1]}
    second = {"input_ids": np.array([5, 6, 7]), "labels": [5, IGN, 7]}
    batch = collated([row(first, second, seq_len=8), row(first, seq_len=8)], pad_token_id=9)
    assert batch == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7, 9], [1, 2, 3, 4, 9, 9, 9, 9]],
        "labels": [[IGN, IGN, 3, 4, IGN, IGN, 7, IGN], [IGN, IGN, 3, 4, IGN, IGN, IGN, IGN]],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 0, 0, 0, 0]],
        "document_ids": [[0, 0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 0, -1, -1, -1, -1]],
        "cu_seqlens": [0, 4, 7, 8, 12, 16],
        "max_seqlen": 4,
    }


def test_packed_rows_with_shifted_labels() -> None:
    documents = ({"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}, {"input_ids": [4, 5], "loss_mask": [1, 1]})
    assert collated([row(*documents, seq_len=5)], shift_labels=True)["labels"] == [[2, 3, IGN, 5, IGN]]


@pytest.mark.parametrize("strategy", ["greedy", "first_fit", "best_fit"])
def test_packing_cuts_what_is_trained_like_the_tokens(strategy: Any) -> None:
    rng = np.random.default_rng(2)
    samples = [{"input_ids": (tokens := rng.integers(1, 90, length)), "loss_mask": tokens % 2} for length in (5, 19, 3, 8, 1, 12)]
    batcher = Pack(8, rows=2, strategy=strategy).start()
    groups = [group for seq, sample in enumerate(samples) for group in batcher.push(Item(sample, seq, 0, ("s", seq)))]
    for group in [*groups, *batcher.finish()]:
        batch = SftCollator(pad_token_id=0)(list(group.samples))
        is_target = (batch["input_ids"] % 2 == 1) & (batch["position_ids"] > 0)
        assert (batch["labels"] == np.where(is_target, batch["input_ids"], IGN)).all()


def test_several_turns() -> None:
    sample = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 1, 1, 0, 0, 1]}
    assert collated([sample])["labels"] == [[IGN, 2, 3, IGN, IGN, 6]]


def test_a_token_is_trained_only_if_all_fields_say_so() -> None:
    sample = {"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, 3, IGN, 5], "loss_mask": [1, 1, 0, 1, 1], "prompt_length": 2}
    assert collated([sample])["labels"] == [[IGN, IGN, IGN, IGN, 5]]


def test_the_first_token_is_never_a_target() -> None:
    assert collated([{"input_ids": [1, 2], "prompt_length": 0}])["labels"] == [[IGN, 2]]


def test_labels_can_be_shifted() -> None:
    samples = [{"input_ids": [1, 2, 3, 4], "prompt_length": 2}, {"input_ids": [5, 6], "prompt_length": 0}]
    assert collated(samples, shift_labels=True)["labels"] == [[IGN, 3, 4, IGN], [6, IGN, IGN, IGN]]


def test_padding_to_a_multiple_with_chosen_ids() -> None:
    batch = collated([{"input_ids": [1, 2, 3], "prompt_length": 1}], pad_token_id=7, ignore_index=-1, pad_to_multiple_of=4)
    assert batch == {"input_ids": [[1, 2, 3, 7]], "labels": [[-1, 2, 3, -1]], "attention_mask": [[1, 1, 1, 0]]}


def test_a_long_sample_is_refused_with_its_length_and_the_limit() -> None:
    samples = [{"input_ids": [1] * 10, "prompt_length": 0}, {"input_ids": [1] * 15, "prompt_length": 0}]
    with pytest.raises(BatchError, match=r"SftCollator: sample 1\['input_ids'\]: expected at most max_length=10 tokens, got 15; shorten"):
        collated(samples, max_length=10)


def test_truncation_keeps_the_first_tokens_and_all_short_samples() -> None:
    samples = [{"input_ids": list(range(length)), "prompt_length": 1} for length in (5, 10, 15)]
    batch = collated(samples, max_length=10, overflow="truncate")
    assert [sum(mask) for mask in batch["attention_mask"]] == [5, 10, 10]
    assert batch["input_ids"][2] == list(range(10))
    assert batch["labels"][2] == [IGN, *range(1, 10)]


def test_a_prompt_beyond_the_limit_leaves_no_target() -> None:
    batch = collated([{"input_ids": [1, 2, 3, 4], "prompt_length": 3}], max_length=2, overflow="truncate")
    assert batch["labels"] == [[IGN, IGN]]


@settings(max_examples=60, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=5),
    multiple=st.integers(1, 5),
    shift=st.booleans(),
)
def test_counts_are_those_of_the_samples(masks: list[list[bool]], multiple: int, shift: bool) -> None:
    samples = [{"input_ids": list(range(len(mask))), "loss_mask": mask} for mask in masks]
    batch = SftCollator(pad_token_id=0, pad_to_multiple_of=multiple, shift_labels=shift)(samples)
    num_rows, width = batch["input_ids"].shape
    longest = max(map(len, masks))
    assert width % multiple == 0
    assert longest <= width < longest + multiple
    num_tokens = sum(map(len, masks))
    assert count_tokens(batch) == (num_tokens, num_rows * width - num_tokens, sum(sum(mask[1:]) for mask in masks))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], r"expected at least one sample, got none"),
        ([{"input_ids": [1, 2]}], r"sample 0: expected 'input_ids' and one of labels, loss_mask, prompt_length, got \['input_ids'\]; say"),
        ([[1, 2]], r"sample 0: expected 'input_ids' and one of .*, got list"),
        ([{"labels": [1]}], r"sample 0: expected the field 'input_ids', got fields \['labels'\]"),
        ([{"input_ids": [1, 2], "labels": [1, 2, 3]}], r"sample 0\['labels'\]: expected 2 values, one per token, got 3"),
        ([{"input_ids": [1, 2], "loss_mask": [0.5, 1.0]}], r"sample 0\['loss_mask'\]: expected a 1-D integer array, got float64\[2\]"),
        ([{"input_ids": [1, 2], "prompt_length": 3}], r"sample 0\['prompt_length'\]: expected an int from 0 to its 2 tokens, got 3"),
        ([{"input_ids": [1, 2], "prompt_length": -1}], r"expected an int from 0 to its 2 tokens, got -1"),
        ([{"input_ids": [1, 2], "prompt_length": 1.0}], r"expected an int from 0 to its 2 tokens, got 1.0"),
        ([{"input_ids": [1], "loss_mask": [1]}, row(seq_len=4)], r"sample 1: expected a plain sample, got a PackedRow"),
        ([row(seq_len=4), {"input_ids": [1], "loss_mask": [1]}], r"sample 1: expected a PackedRow like sample 0, got dict"),
        ([row({"input_ids": [1]}, seq_len=4)], r"sample 0, piece 0: expected 'input_ids' and one of labels, .*, got \['input_ids'\]; say"),
    ],
)
def test_malformed_samples_are_refused_by_name(samples: list[Any], message: str) -> None:
    with pytest.raises(BatchError, match=rf"SftCollator: .*{message}"):
        SftCollator(pad_token_id=0)(samples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_token_id": None}, r"SftCollator\(pad_token_id=...\): expected an int, got None"),
        ({"ignore_index": "x"}, r"SftCollator\(ignore_index=...\): expected an int, got 'x'"),
        ({"pad_to_multiple_of": 0}, r"SftCollator\(pad_to_multiple_of=...\): expected an int >= 1, got 0"),
        ({"shift_labels": None}, r"SftCollator\(shift_labels=...\): expected True or False, got None"),
        ({"max_length": 0}, r"SftCollator\(max_length=...\): expected an int >= 1, got 0"),
        ({"max_length": 10, "pad_to_multiple_of": 8}, r"expected a multiple of pad_to_multiple_of=8, got 10; round it"),
        ({"overflow": "drop"}, r"SftCollator\(overflow=...\): expected 'error' or 'truncate', got 'drop'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SftCollator(**{"pad_token_id": 0, **options})


def test_options_travel_compare_and_identify_themselves() -> None:
    collator = SftCollator(pad_token_id=3, max_length=16)
    again = pickle.loads(pickle.dumps(collator))
    assert again == collator
    assert hash(again) == hash(collator)
    assert json.loads(json.dumps(again.fingerprint())) == collator.fingerprint() != SftCollator(pad_token_id=3).fingerprint()
