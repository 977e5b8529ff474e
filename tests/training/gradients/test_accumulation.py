"""Sums over micro-batches on one rank: wide sums where asked for, and a warning where a narrow one is too long."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.training.gradients.synchronizer import GradientSynchronizer
from tests.training.ranks import Store, run_ranks

NUM_TERMS = 512


def one_weight(dtype: torch.dtype = torch.bfloat16) -> nn.ParameterDict:
    return nn.ParameterDict({"p": nn.Parameter(torch.zeros(2, dtype=dtype))})


def own_gradient(model: nn.ParameterDict) -> list[float]:
    gradient = model["p"].grad
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16
    return [float(value) for value in gradient]


def accumulate(model: nn.ParameterDict, synchronizer: GradientSynchronizer, num_terms: int) -> None:
    for _ in range(num_terms):
        with synchronizer.no_sync():
            model["p"].sum().backward()
    synchronizer.sync_gradients()


def test_a_bfloat16_sum_of_equal_terms_stands_still_and_a_float32_one_does_not() -> None:
    narrow, wide = one_weight(), one_weight()
    with pytest.warns(UserWarning, match="more than 128 micro-batches are added up in torch.bfloat16.*accumulate_dtype=torch.float32"):
        accumulate(narrow, GradientSynchronizer(narrow, Mesh()), NUM_TERMS)
    assert own_gradient(narrow) == [256.0, 256.0]
    synchronizer = GradientSynchronizer(wide, Mesh(), accumulate_dtype=torch.float32)
    accumulate(wide, synchronizer, NUM_TERMS)
    assert [(average.dtype, average.tolist()) for _, average in synchronizer.gradients()] == [(torch.float32, [512.0, 512.0])]
    assert own_gradient(wide) == [512.0, 512.0]
    assert synchronizer.num_bytes == 0


@pytest.mark.parametrize(("dtype", "accumulate_dtype"), [(torch.float32, None), (torch.bfloat16, torch.float32)])
def test_sums_that_can_hold_their_terms_are_not_warned_of(dtype: torch.dtype, accumulate_dtype: torch.dtype | None) -> None:
    model = one_weight(dtype)
    accumulate(model, GradientSynchronizer(model, Mesh(), accumulate_dtype=accumulate_dtype), 130)


def test_each_step_counts_anew_and_one_warning_is_enough() -> None:
    model = one_weight()
    synchronizer = GradientSynchronizer(model, Mesh())
    for _ in range(3):
        accumulate(model, synchronizer, 128)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accumulate(model, synchronizer, 300)
        accumulate(model, synchronizer, 300)
    assert len(caught) == 1


def test_a_window_is_dropped_by_discard_and_a_kept_grad_is_added_to() -> None:
    model = one_weight()
    synchronizer = GradientSynchronizer(model, Mesh(), accumulate_dtype=torch.float32)
    with synchronizer.no_sync():
        model["p"].sum().backward()
    synchronizer.discard_gradients()
    assert [parameter.grad for parameter in model.parameters()] == [None]
    accumulate(model, synchronizer, 1)
    assert own_gradient(model) == [1.0, 1.0]
    accumulate(model, synchronizer, 1)  # without zero_grad, as in plain torch
    assert own_gradient(model) == [2.0, 2.0]


def test_averages_are_scaled_in_both_places() -> None:
    model = one_weight()
    synchronizer = GradientSynchronizer(model, Mesh(), accumulate_dtype=torch.float32)
    accumulate(model, synchronizer, 3)
    synchronizer.scale_gradients(0.5)
    assert [average.tolist() for _, average in synchronizer.gradients()] == [[1.5, 1.5]]
    assert own_gradient(model) == [1.5, 1.5]


def test_averages_of_an_open_window_are_refused() -> None:
    model = one_weight()
    synchronizer = GradientSynchronizer(model, Mesh(), accumulate_dtype=torch.float32)
    accumulate(model, synchronizer, 1)
    model["p"].sum().backward()
    with pytest.raises(ConfigError, match=r"gradients\(\): expected synchronized gradients, got an open accumulation window"):
        list(synchronizer.gradients())


@pytest.mark.parametrize(
    ("dtype", "accumulate_dtype", "message"),
    [
        (torch.float32, torch.bfloat16, "expected parameters that fit in torch.bfloat16, got torch.float32 for p"),
        (torch.float16, torch.bfloat16, "expected parameters that fit in torch.bfloat16, got torch.float16 for p"),
        (torch.bfloat16, torch.int32, "expected a floating-point dtype, got torch.int32"),
    ],
)
def test_sums_that_cannot_hold_their_terms_are_refused(dtype: torch.dtype, accumulate_dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientSynchronizer(one_weight(dtype), Mesh(), accumulate_dtype=accumulate_dtype)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_sums_in_float64_are_the_same_bits_however_micro_batches_are_spread(dtype: torch.dtype | None) -> None:
    """In float32 they are not: what is added to what depends on the number of ranks."""

    def gradients(rank: int, _store: Store) -> list[str]:
        size = int(os.environ["WORLD_SIZE"])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
        synchronizer = GradientSynchronizer(model, Mesh(dp_rank=rank, dp_size=size), accumulate_dtype=dtype)
        batches = list(torch.randn(8, 16, 40))[rank::size]
        for number, batch in enumerate(batches):
            with synchronizer.no_sync() if number + 1 < len(batches) else nullcontext():
                (model(batch).square().sum() / len(batches)).backward()
        synchronizer.sync_gradients()
        return [str(parameter.grad.double().tolist()) for parameter in model.parameters() if parameter.grad is not None]

    one, two, four = (run_ranks(size, gradients)[0] for size in (1, 2, 4))
    assert len(one) == 4
    assert (one == two == four) is (dtype is torch.float64)
