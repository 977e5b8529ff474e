from __future__ import annotations

from typing import Any

import pytest
import torch

from aioloader import BatchError
from aioloader.bridge.filler import can_fill, filler_fields

OUTLINE: list[list[Any]] = [
    ["input_ids", "int64", [2, 8]],
    ["labels", "int64", [2, 8]],
    ["attention_mask", "bool", [2, 8]],
    ["cu_seqlens", "int32", [4]],
    ["max_seqlen", "int32", []],
    ["pixels", "bfloat16", [2, 3]],
    ["text", None, None],
]


def test_a_filler_looks_like_the_last_micro_batch_and_has_no_target() -> None:
    fields = filler_fields({"3": {"filler": OUTLINE}}, 3)
    assert list(fields) == [name for name, _, _ in OUTLINE]
    for name, dtype, shape in OUTLINE:
        if dtype is not None:
            assert (fields[name].dtype, list(fields[name].shape)) == (getattr(torch, dtype), shape)
    assert fields["labels"].unique().tolist() == [-100]
    assert fields["attention_mask"].all(), "a row that attends to nothing would give NaN"
    assert fields["cu_seqlens"].tolist() == [0, 1, 2, 16], "increasing from 0 to all tokens, as attention kernels want it"
    assert fields["max_seqlen"].item() == 16
    assert not fields["pixels"].any()
    assert fields["text"] is None


def test_a_lane_without_a_micro_batch_takes_after_another_lane() -> None:
    lanes = {"0": {"filler": None}, "2": {"filler": OUTLINE}}
    assert can_fill(lanes)
    assert filler_fields(lanes, 0)["input_ids"].shape == (2, 8)


def test_a_rank_without_a_micro_batch_has_nothing_to_go_by() -> None:
    assert not can_fill({"0": {"filler": None}})
    with pytest.raises(BatchError, match=r"at least one micro-batch on each rank.*end='drop'"):
        filler_fields({"0": {"filler": None}}, 0)
