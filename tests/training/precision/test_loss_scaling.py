"""The loss scale: falls at once, grows slowly, goes on from a state, and never leaves its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ConfigError
from aioloader.training.precision.loss_scaling import DynamicLossScale, LossScaler, make_loss_scaler


def test_a_dynamic_scale_halves_on_an_overflow_and_doubles_after_an_interval_of_finite_steps() -> None:
    scaler = LossScaler(DynamicLossScale(initial=64.0, growth_interval=3))
    scales = []
    for overflowed in (False, False, True, False, False, False, False):
        scaler.update(overflowed=overflowed)
        scales.append(scaler.scale)
    assert scales == [64.0, 64.0, 32.0, 32.0, 32.0, 64.0, 64.0]
    assert scaler.num_overflows == 1


@given(st.lists(st.booleans(), max_size=60))
def test_it_agrees_with_the_scaler_of_torch(overflows: list[bool]) -> None:
    scaler = LossScaler(DynamicLossScale(initial=2.0**10, growth_interval=4, minimum=2.0**-40, maximum=2.0**40))
    growth, scale = torch.zeros((), dtype=torch.int32), torch.full((), 2.0**10)
    for overflowed in overflows:
        torch._amp_update_scale_(scale, growth, torch.tensor(float(overflowed)), 2.0, 0.5, 4)
        scaler.update(overflowed=overflowed)
        assert scaler.scale == float(scale)


def test_it_stays_between_its_limits() -> None:
    scaler = LossScaler(DynamicLossScale(initial=4.0, growth_interval=1, minimum=2.0, maximum=8.0))
    for _ in range(5):
        scaler.update(overflowed=True)
    assert scaler.scale == 2.0
    for _ in range(5):
        scaler.update(overflowed=False)
    assert scaler.scale == 8.0


def test_a_fixed_scale_never_moves() -> None:
    scaler = LossScaler(128.0)
    for overflowed in (True, False) * 3000:
        scaler.update(overflowed=overflowed)
    assert (scaler.scale, scaler.num_overflows) == (128.0, 3000)


def test_a_state_goes_on_in_the_middle_of_an_interval() -> None:
    rule = DynamicLossScale(initial=64.0, growth_interval=3)
    first, second = LossScaler(rule), LossScaler(rule)
    for overflowed in (True, False, False):
        first.update(overflowed=overflowed)
    second.load_state_dict(first.state_dict())
    second.update(overflowed=False)
    assert (second.scale, second.num_overflows) == (64.0, 1)


@pytest.mark.parametrize(
    ("loss_scale", "dtype", "scale"),
    [
        (None, torch.float16, 2.0**16),
        (None, torch.bfloat16, None),
        (None, torch.float32, None),
        ("dynamic", torch.bfloat16, 2.0**16),
        (DynamicLossScale(initial=8.0), torch.float16, 8.0),
        (1024, torch.float16, 1024.0),
    ],
)
def test_which_scale_a_run_gets(loss_scale: Any, dtype: torch.dtype, scale: float | None) -> None:
    scaler = make_loss_scaler(loss_scale, dtype)
    assert (None if scaler is None else scaler.scale) == scale


@pytest.mark.parametrize("loss_scale", [0, -1.0, math.inf, math.nan, True, "static", [1]])
def test_other_scales_are_refused(loss_scale: Any) -> None:
    with pytest.raises(ConfigError, match=r'^loss_scale: expected "dynamic", a DynamicLossScale, a finite number above 0, or None, got'):
        make_loss_scaler(loss_scale, torch.float16)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"initial": 0.0}, "initial"),
        ({"initial": 4.0, "maximum": 2.0}, "initial"),
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
    ],
)
def test_rules_out_of_range_are_refused(options: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=f"{where}.*: expected"):
        DynamicLossScale(**options)
