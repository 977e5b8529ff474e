from __future__ import annotations

import array
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from aioloader.batching.admission import Admission, require_field
from aioloader.errors import BatchError, ConfigError, ResumeError
from aioloader.protocols import Item


def item(sample: Any) -> Item:
    return Item(sample, 5, 1, ("shard", 3))


def tokens(length: int) -> Item:
    return item({"input_ids": [0] * length})


@pytest.mark.parametrize(
    "values",
    [
        [7, 7, 7],
        (7, 7, 7),
        range(3),
        array.array("i", [7, 7, 7]),
        np.array([7, 7, 7]),
        torch.tensor([7, 7, 7]),
        3,
        np.int64(3),
        np.array(3),
        torch.tensor(3),
    ],
    ids=repr,
)
def test_a_field_tells_the_length_by_its_own_or_as_a_number(values: Any) -> None:
    assert Admission("Bucket", "input_ids", 9, "error").admit(item({"input_ids": values})) == 3


def test_any_mapping_is_a_sample_and_other_fields_do_not_matter() -> None:
    sample = MappingProxyType({"ids": [1, 2], "pixels": np.zeros((3, 4, 4)), "text": "abc"})
    assert Admission("Bucket", "ids", 9, "error").admit(item(sample)) == 2


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([1, 2], r"expected a mapping with the 1-D field 'input_ids', got list; return \{'input_ids': tokens\} from preprocess"),
        (None, r"expected a mapping .* got NoneType"),
        ({"text": "ab"}, r"expected the field 'input_ids', got fields \['text'\]; add it in preprocess or set Bucket\(field=...\)"),
        ({"input_ids": "ab"}, r"to be 1-D or a whole number >= 0, got str; give the tokens"),
        ({"input_ids": b"ab"}, r"got bytes"),
        ({"input_ids": {1: 2}}, r"got dict"),
        ({"input_ids": {1, 2}}, r"got set"),
        ({"input_ids": None}, r"got NoneType"),
        ({"input_ids": True}, r"got bool"),
        ({"input_ids": 2.0}, r"got float"),
        ({"input_ids": -1}, r"got -1"),
        ({"input_ids": np.zeros((1, 2), dtype=int)}, r"got ndarray of shape \(1, 2\)"),
        ({"input_ids": np.array([[2]])}, r"got ndarray of shape \(1, 1\)"),
        ({"input_ids": np.array(2.5)}, r"got ndarray of shape \(\)"),
        ({"input_ids": torch.zeros(1, 2)}, r"got Tensor of shape \(1, 2\)"),
    ],
)
def test_a_sample_without_a_length_is_refused_by_name(sample: Any, message: str) -> None:
    with pytest.raises(BatchError, match=rf"record shard\[3\], seq 5: Bucket: .*{message}"):
        Admission("Bucket", "input_ids", 9, "error").admit(item(sample))


def test_empty_samples_are_left_out_and_counted() -> None:
    admission = Admission("Bucket", "input_ids", 9, "error")
    assert [admission.admit(tokens(length)) for length in (0, 9, 0, 1)] == [0, 9, 0, 1]
    assert nonzero(admission) == {"empty_samples": 2}


@pytest.mark.parametrize(
    ("overflow", "admitted", "counted"),
    [
        ("drop", [0, 0, 4], {"dropped_samples": 2, "dropped_tokens": 12}),
        ("alone", [5, 7, 4], {"alone_samples": 2, "alone_tokens": 12}),
    ],
)
def test_over_long_samples_follow_the_policy_and_are_counted(overflow: Any, admitted: list[int], counted: dict[str, int]) -> None:
    admission = Admission("Bucket", "input_ids", 4, overflow)
    assert [admission.admit(tokens(length)) for length in (5, 7, 4)] == admitted
    assert nonzero(admission) == counted


def test_over_long_samples_are_an_error_by_name() -> None:
    admission = Admission("TokenBudget", "input_ids", 4, "error")
    with pytest.raises(
        BatchError, match=r"TokenBudget: expected at most 4 tokens, got 5; shorten it .* overflow='drop' or 'alone'"
    ) as raised:
        admission.admit(tokens(5))
    assert (raised.value.seq, raised.value.record) == (5, ("shard", 3))
    assert nonzero(admission) == {}


def test_a_sample_of_another_length_does_not_fit_a_state() -> None:
    admission = Admission("Bucket", "input_ids", 9, "error")
    assert admission.require_length(tokens(4), range(3, 5)) == 4
    with pytest.raises(ResumeError, match=r"length of sample 1 of the record with seq 5: expected '5 tokens' .* got '3 to 4 tokens'"):
        admission.require_length(tokens(5), range(3, 5))
    with pytest.raises(ResumeError, match=r"expected '5 tokens' \(this loader\), got '4 tokens' \(the state\)"):
        admission.require_length(tokens(5), range(4, 5))


@pytest.mark.parametrize("field", ["", None, 3])
def test_a_field_is_named_by_text(field: Any) -> None:
    with pytest.raises(ConfigError, match=r"Bucket\(field=...\): expected a field name, got .*; name the field"):
        require_field("Bucket(field=...)", field)


def nonzero(admission: Admission) -> dict[str, int]:
    return {name: count for name, count in admission.counters.items() if count}
