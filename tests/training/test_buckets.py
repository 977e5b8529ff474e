"""Buckets: every element in exactly one, of one kind, within the limit; averages that keep dtype and gaps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from aioloader.training.buckets import Bucket, plan_buckets

SIZES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)))


@given(sizes=SIZES, max_bytes=st.integers(1, 100))
def test_a_plan_is_a_disjoint_cover_within_the_limit(sizes: list[tuple[str, int]], max_bytes: int) -> None:
    buckets = plan_buckets(sizes, max_bytes)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True)
        assert len({sizes[index][0] for index in bucket}) == 1
        assert len(bucket) == 1 or sum(sizes[index][1] for index in bucket) <= max_bytes


@given(sizes=SIZES)
def test_with_room_there_is_one_bucket_for_each_kind(sizes: list[tuple[str, int]]) -> None:
    assert len(plan_buckets(sizes, 10**9)) == len({kind for kind, _ in sizes})


def test_the_plan_of_a_small_model_is_pinned() -> None:
    sizes = [("f32", 40), ("f32", 30), ("bf16", 10), ("f32", 200), ("f32", 60)]
    assert plan_buckets(sizes, 100) == [[4], [3], [2], [1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_pack_and_unpack_average_over_the_ranks(dtype: torch.dtype) -> None:
    ranks = [[Parameter(torch.zeros(2, 3, dtype=dtype)), Parameter(torch.zeros(4, dtype=dtype))] for _ in range(2)]
    ranks[0][0].grad = torch.full((2, 3), 6.0, dtype=dtype)
    buckets = [Bucket([1, 0], parameters, None, 2) for parameters in ranks]
    flat = buckets[0].pack() + buckets[1].pack()
    assert flat.dtype == dtype
    assert buckets[0].num_bytes == 10 * dtype.itemsize
    for parameters, bucket in zip(ranks, buckets, strict=True):
        bucket.unpack(flat, [False, True])
        assert parameters[0].grad is not None
        assert torch.equal(parameters[0].grad, torch.full((2, 3), 3.0, dtype=dtype))
        assert parameters[1].grad is None


def test_a_gradient_keeps_its_dtype_whatever_is_on_the_wire() -> None:
    parameter = Parameter(torch.zeros(3, dtype=torch.float32))
    parameter.grad = torch.ones(3)
    bucket = Bucket([0], [parameter], torch.bfloat16, 1)
    flat = bucket.pack()
    bucket.unpack(flat, [True])
    assert (flat.dtype, parameter.grad.dtype) == (torch.bfloat16, torch.float32)
    assert bucket.describe() == "bfloat16[3]"
