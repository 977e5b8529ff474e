"""The factor on the loss that keeps small float16 gradients above zero.

    scaler.scale x loss -> backward -> gradients / scaler.scale      all finite: after `growth_interval` such steps, a larger scale
                                                                     not finite: the step is skipped, a smaller scale

The scale is a plain number that is decided from what all ranks agreed on, so it is the same on each.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from aioloader.errors import ConfigError
from aioloader.options import check_int

__all__ = ["DynamicLossScale", "LossScaler", "make_loss_scaler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicLossScale:
    """How the loss scale moves; the defaults are those of `torch.amp.GradScaler`.

    Attributes:
        initial: First scale, from `minimum` to `maximum`.
        growth_factor: The scale is multiplied by it after `growth_interval` finite steps in a row; above 1.
        backoff_factor: The scale is multiplied by it after a step that was not finite; between 0 and 1.
        growth_interval: Finite steps in a row until the scale grows; 1 or more.
        minimum: The scale never falls below it.
        maximum: The scale never grows above it.

    With powers of two, scaling and unscaling lose no bit.

    Raises:
        ConfigError: A value is out of range.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
    """

    initial: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        check_int("growth_interval", self.growth_interval, at_least=1, do="leave it out for 2000 steps")
        rules = {
            "initial": (0 < self.minimum <= self.initial <= self.maximum < math.inf, "0 < minimum <= initial <= maximum"),
            "growth_factor": (1 < self.growth_factor < math.inf, "a number above 1"),
            "backoff_factor": (0 < self.backoff_factor < 1, "a number between 0 and 1"),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ConfigError(
                    f"DynamicLossScale({name}=)", expected=expected, got=getattr(self, name), do="leave it out for the default"
                )


class LossScaler:
    """The present scale, and the rule that moves it. A fixed number never moves.

    Attributes:
        scale: What the loss of the next micro-batch is multiplied by.
        num_overflows: Steps so far whose gradients were not finite.
    """

    def __init__(self, rule: DynamicLossScale | float) -> None:
        self._rule = rule
        self.scale = rule.initial if isinstance(rule, DynamicLossScale) else float(rule)
        self.num_overflows = 0
        self._num_finite = 0

    def __repr__(self) -> str:
        return f"LossScaler(scale={self.scale:g}, num_overflows={self.num_overflows}, rule={self._rule})"

    def update(self, *, overflowed: bool) -> None:
        """Take note of one step, and of whether any of its gradients was not finite."""
        self.num_overflows += overflowed
        rule = self._rule
        if not isinstance(rule, DynamicLossScale):
            return
        self._num_finite = 0 if overflowed else self._num_finite + 1
        if overflowed:
            self.scale = max(self.scale * rule.backoff_factor, rule.minimum)
        elif self._num_finite == rule.growth_interval:
            self.scale = min(self.scale * rule.growth_factor, rule.maximum)
            self._num_finite = 0

    def describe(self) -> str:
        """Return the rule in one line, to compare a state with."""
        return repr(asdict(self._rule)) if isinstance(self._rule, DynamicLossScale) else f"fixed at {self._rule:g}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-compatible data."""
        return {"scale": self.scale, "num_overflows": self.num_overflows, "num_finite": self._num_finite}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.scale, self.num_overflows, self._num_finite = state["scale"], state["num_overflows"], state["num_finite"]


def make_loss_scaler(loss_scale: object, compute_dtype: torch.dtype) -> LossScaler | None:
    """Return the scaler for `loss_scale`: `"dynamic"`, a `DynamicLossScale`, a number, or None for what `compute_dtype` needs.

    Only float16 needs one: bfloat16 and float32 reach down to 1e-38.

    Raises:
        ConfigError: It is none of these, or not a finite number above 0.
    """
    if loss_scale is None:
        return LossScaler(DynamicLossScale()) if compute_dtype == torch.float16 else None
    if loss_scale == "dynamic":
        return LossScaler(DynamicLossScale())
    if isinstance(loss_scale, DynamicLossScale):
        return LossScaler(loss_scale)
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, int | float) or not 0 < loss_scale < math.inf:
        raise ConfigError(
            "loss_scale",
            expected='"dynamic", a DynamicLossScale, a finite number above 0, or None',
            got=repr(loss_scale),
            do="leave it out: float16 then gets a dynamic scale, other dtypes none",
        )
    return LossScaler(float(loss_scale))
