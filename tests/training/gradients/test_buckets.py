"""Buckets: every element in exactly one, of one kind, within the limit; averages that keep dtype and gaps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from aioloader.training.gradients.buckets import Bucket, FlatGradients, plan_buckets

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


def pair(dtype: torch.dtype = torch.float32) -> list[tuple[str, Parameter]]:
    return [("w", Parameter(torch.zeros(2, 3, dtype=dtype))), ("b", Parameter(torch.zeros(4, dtype=dtype)))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_shares_add_up_to_the_average(dtype: torch.dtype) -> None:
    ranks = [pair(dtype) for _ in range(2)]
    buckets = [Bucket([1, 0], named) for named in ranks]
    flats = [FlatGradients(bucket, 1 / 2) for bucket in buckets]
    ranks[0][0][1].grad = torch.full((2, 3), 6.0, dtype=dtype)
    flats[0].take(1)
    assert ranks[0][0][1].grad is None
    total = flats[0].seal() + flats[1].seal()
    assert total.dtype == dtype
    assert buckets[0].num_bytes == 10 * dtype.itemsize
    for named, flat in zip(ranks, flats, strict=True):
        flat.values.copy_(total)
        flat.hand_out([False, True])
        assert named[1][1].grad is None
        gradient = named[0][1].grad
        assert gradient is not None
        assert torch.equal(gradient, torch.full((2, 3), 3.0, dtype=dtype))
        assert gradient.data_ptr() == flat.views[1].data_ptr()  # no copy


def test_what_comes_later_is_added_until_the_next_step() -> None:
    named = pair()
    flat = FlatGradients(Bucket([1, 0], named), 1.0)
    for value in (1.0, 2.0):
        named[1][1].grad = torch.full((4,), value)
        flat.take(0)
    assert flat.seal().tolist() == [3.0] * 4 + [0.0] * 6
    flat.clear()
    named[1][1].grad = torch.ones(4)
    flat.take(0)
    assert flat.seal().tolist() == [1.0] * 4 + [0.0] * 6


def test_a_gradient_that_lies_in_the_bucket_already_is_scaled_in_place() -> None:
    named = pair()
    flat = FlatGradients(Bucket([1, 0], named), 0.25)
    flat.seal()
    flat.hand_out([True, True])
    for _, parameter in named:
        assert parameter.grad is not None
        parameter.grad += 4.0
    flat.take(0)
    flat.take(1)
    assert flat.seal().tolist() == [1.0] * 10


def test_a_gradient_keeps_its_dtype_whatever_is_on_the_wire() -> None:
    named = pair()
    flat = FlatGradients(Bucket([1], named, comm_dtype=torch.bfloat16), 1.0)
    named[1][1].grad = torch.full((4,), 1 + 2**-10)
    flat.take(0)
    wire = flat.seal()
    flat.open()
    flat.hand_out([True])
    assert wire.dtype == torch.bfloat16
    assert named[1][1].grad is not None
    assert named[1][1].grad.dtype == torch.float32
    assert named[1][1].grad.tolist() == [1.0] * 4


def test_sums_in_a_wider_dtype_lose_nothing_to_the_number_of_ranks() -> None:
    """1/3 of a bfloat16 gradient is taken in float32."""
    named = pair(torch.bfloat16)
    bucket = Bucket([1], named, accumulate_dtype=torch.float32)
    flat = FlatGradients(bucket, 1 / 3)
    for _ in range(3):
        named[1][1].grad = torch.ones(4, dtype=torch.bfloat16)
        flat.take(0)
    assert bucket.widens
    torch.testing.assert_close(flat.seal(), torch.ones(4), rtol=1e-6, atol=0)
    flat.hand_out([True])
    assert named[1][1].grad is not None
    assert named[1][1].grad.dtype == torch.bfloat16


def test_a_bucket_names_its_ends() -> None:
    named = pair()
    assert Bucket([1, 0], named, comm_dtype=torch.bfloat16).describe() == "bfloat16[10], b to w"
    assert Bucket([0], named).describe() == "float32[6], w"
