"""Runs the transforms of a step in order, with what each remembers, and moves the loss scale by what they found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioloader.errors import ConfigError
from aioloader.protocols import Json
from aioloader.training.precision.loss_scaling import LossScaler
from aioloader.training.precision.transforms import GradientStep, GradientTransform, SkipNonFinite

__all__ = ["TransformChain"]


class TransformChain:
    """The transforms of a run. With a loss scale, a check for overflows comes first unless one of the transforms does it.

    Attributes:
        scaler: The loss scale; None without one.

    Raises:
        ConfigError: A transform cannot be called.
    """

    def __init__(self, transforms: Sequence[GradientTransform], scaler: LossScaler | None) -> None:
        for transform in transforms:
            given: object = transform
            if isinstance(given, type) or not callable(given):
                do = "give e.g. (SkipNonFinite(), ClipGradNorm(1.0))"
                raise ConfigError("transforms", expected="functions of a GradientStep", got=repr(given), do=do)
        guarded = scaler is None or any(isinstance(transform, SkipNonFinite) for transform in transforms)
        self._transforms = tuple(transforms) if guarded else (SkipNonFinite(), *transforms)
        self._counters: list[dict[str, Json]] = [{} for _ in self._transforms]
        self.scaler = scaler

    @property
    def loss_scale(self) -> float:
        """Return the present scale; 1 without one."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def run(self, step: GradientStep) -> None:
        """Call the transforms on `step` until one skips it."""
        for transform, counters in zip(self._transforms, self._counters, strict=True):
            step.counters = counters
            transform(step)
            if step.skipped is not None:
                break
        if self.scaler is not None:
            self.scaler.update(overflowed=step.overflowed)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and what the transforms remember, JSON-compatible."""
        scaler = self.scaler
        return {
            "loss_scale": None if scaler is None else {"rule": scaler.describe(), **scaler.state_dict()},
            "transforms": [
                {"name": _name(transform), "counters": dict(counters)}
                for transform, counters in zip(self._transforms, self._counters, strict=True)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same transforms and loss scale."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state["loss_scale"])
        self._counters = [dict(transform["counters"]) for transform in state["transforms"]]


def _name(transform: GradientTransform) -> str:
    return str(getattr(transform, "__qualname__", type(transform).__name__))
