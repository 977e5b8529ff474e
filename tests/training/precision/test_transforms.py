"""ClipGradNorm and SkipNonFinite: the norm of the dense model however it is cut, and one verdict for all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aioloader.errors import ConfigError, StallError
from aioloader.order.mesh import Mesh
from aioloader.training.precision.nonfinite import NonFiniteWatch
from aioloader.training.precision.step_ranks import StepRanks
from aioloader.training.precision.transforms import ClipGradNorm, GradientStep, SkipNonFinite, is_tensor_parallel
from tests.training.ranks import run_cases
from tests.training.transform_cases import SIZES, own_values

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: Any = run_cases("tests.training.transform_cases", tmp_path_factory.mktemp("transforms"))
    return list(found)


def step_of(*gradients: Tensor) -> GradientStep:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    names = [f"p{index}" for index in range(len(gradients))]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    alone = StepRanks.resolve(Mesh(), None, torch.device("cpu"))
    watch = NonFiniteWatch(names, parameters)
    return GradientStep(number=1, names=names, parameters=parameters, masters=parameters, ranks=alone, watch=watch)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_it_clips_as_torch_does_to_the_bit(max_norm: float, norm_type: float) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(7, 3), torch.randn(5), torch.randn(())]
    step, other = step_of(*gradients), step_of(*gradients)
    ClipGradNorm(max_norm, norm_type)(step)
    norm = nn.utils.clip_grad_norm_(other.masters, max_norm, norm_type)
    assert torch.equal(torch.as_tensor(step.metrics["grad_norm"]), norm)
    assert all(torch.equal(one, another) for one, another in zip(step.gradients, other.gradients, strict=True))
    assert torch.equal(step.gradients[0], gradients[0]) == (max_norm > 1)


def test_an_infinite_limit_only_measures() -> None:
    step = step_of(torch.tensor([3.0, 4.0]))
    ClipGradNorm(math.inf)(step)
    assert (float(step.metrics["grad_norm"]), step.gradients[0].tolist()) == (5.0, [3.0, 4.0])


def test_a_step_without_gradients_has_norm_zero_and_is_finite() -> None:
    step = step_of()
    SkipNonFinite()(step)
    ClipGradNorm(1.0)(step)
    assert (float(step.metrics["grad_norm"]), step.skipped) == (0.0, None)


@pytest.mark.parametrize(("max_norm", "norm_type"), [(0.0, 2.0), (-1.0, 2.0), (math.nan, 2.0), (1.0, 0.5), (1.0, math.nan)])
def test_limits_out_of_range_are_refused(max_norm: float, norm_type: float) -> None:
    with pytest.raises(ConfigError, match=r"^ClipGradNorm\(.*=\): expected"):
        ClipGradNorm(max_norm, norm_type)


def test_what_marks_a_parameter_as_sharded() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert not is_tensor_parallel("p", parameter)
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    assert is_tensor_parallel("p", parameter)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step_and_names_the_parameter(value: float) -> None:
    step = step_of(torch.ones(3), torch.tensor([1.0, value]), torch.tensor([value]))
    SkipNonFinite()(step)
    assert step.skipped == "averaged gradient of p1 is not finite on rank 0"
    assert step.counters == {"num_skipped": 1, "num_consecutive": 1}


def test_gradients_whose_squares_overflow_are_finite() -> None:
    step = step_of(torch.full((4,), 1e30))
    SkipNonFinite()(step)
    assert step.skipped is None


def test_skips_are_counted_in_a_row_and_in_all() -> None:
    transform, counters = SkipNonFinite(max_consecutive=2), dict[str, Any]()
    good, bad = torch.ones(1), torch.tensor([math.nan])
    for gradient in (bad, bad, good, bad, bad):
        step = step_of(gradient)
        step.counters = counters
        transform(step)
    assert counters == {"num_skipped": 4, "num_consecutive": 2}
    step = step_of(bad)
    step.counters = counters
    with pytest.raises(StallError, match=r"SkipNonFinite, step 1: expected at most 2 steps in a row .* got 3, now: averaged gradient"):
        transform(step)


def test_a_limit_of_skips_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SkipNonFinite\(max_consecutive=\): expected an int of at least 1, got 0"):
        SkipNonFinite(max_consecutive=0)


def test_the_watch_sees_each_backward_pass_until_it_is_armed_again() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    watch = NonFiniteWatch(["a", "b", "c"], parameters)

    def backward(*factors: float) -> None:
        sum((p * factor).sum() for p, factor in zip(parameters, factors, strict=True)).backward()  # type: ignore[union-attr]

    backward(math.nan, 1.0, 1.0)
    assert watch.first() is None
    watch.arm()
    backward(1.0, math.inf, math.nan)
    backward(1.0, 1.0, 1.0)
    assert watch.first() == "b"
    watch.arm()
    assert watch.first() is None
    watch.disarm()
    backward(math.nan, 1.0, 1.0)
    assert watch.first() is None


# On two ranks: C030.


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_over_tensor_parallel_ranks_is_that_of_the_dense_model(ranks: list[dict[str, Any]], norm_type: float) -> None:
    dense = {name: nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
    for name, parameter in dense.items():
        parameter.grad = own_values(name)
    norm = float(nn.utils.clip_grad_norm_(dense.values(), 2.0, norm_type))
    first, second = (rank["sharded_norms"][str(norm_type)] for rank in ranks)
    assert first["norm"] == second["norm"] == pytest.approx(norm, rel=1e-6)
    assert first["updates"]["norm"] == second["updates"]["norm"]
    for name, parameter in dense.items():
        found = first["updates"][name] + (second["updates"][name] if name != "norm" else [])
        torch.testing.assert_close(torch.tensor(found), parameter.grad, rtol=1e-6, atol=0)


def test_pipeline_stages_add_up_and_a_shared_copy_counts_once(ranks: list[dict[str, Any]]) -> None:
    assert [rank["pipeline_norm"] for rank in ranks] == [13.0, 13.0]  # 3, 4 and 12


def test_a_model_of_dtensors_trains_as_the_dense_one(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        dense, sharded = rank["sharded_dtensors"]["dense"], rank["sharded_dtensors"]["sharded"]
        assert sharded["norms"] == pytest.approx(dense["norms"], rel=1e-5)
        for one, other in zip(sharded["weights"], dense["weights"], strict=True):
            assert one == pytest.approx(other, rel=2**-7)
    assert ranks[0]["sharded_dtensors"] == ranks[1]["sharded_dtensors"]
