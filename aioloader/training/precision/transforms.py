"""What may happen to the float32 gradients of a step between averaging and the optimizer: clip them, refuse them, or your own.

    def freeze_embeddings_at_first(step: GradientStep) -> None:        a transform is any such callable
        if step.number <= 100:
            for name, gradient in zip(step.names, step.gradients):
                if name.startswith("embed"):
                    gradient.zero_()

Ranks that hold the same gradients must decide alike: a transform decides from what `GradientStep` says about all ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from aioloader.errors import ConfigError, StallError
from aioloader.options import check_int
from aioloader.protocols import Json
from aioloader.training.precision.masters import local_tensor
from aioloader.training.precision.nonfinite import NonFiniteWatch
from aioloader.training.precision.step_ranks import StepRanks

__all__ = ["ClipGradNorm", "GradientStep", "GradientTransform", "IsSharded", "SkipNonFinite", "is_tensor_parallel"]

IsSharded: TypeAlias = Callable[[str, Parameter], bool]
"""(qualified name, parameter of the model) -> whether each tensor-parallel rank holds another part of it."""


@dataclass(slots=True, kw_only=True)
class GradientStep:
    """The gradients of one optimizer step, averaged, float32 and unscaled, as transforms see and change them in place.

    Attributes:
        number: Of the step, from 1, those left out counted.
        names: Qualified names of the parameters that have a gradient, in the model's order; the next two in the same order.
        parameters: The model's parameters, for the marks on them; not to be changed.
        masters: Their float32 masters, which hold the gradients in `.grad`.
        ranks: All ranks that take the step together.
        watch: Tells which rank a gradient that is not finite came from.
        counters: What the present transform wants to remember, JSON-compatible; saved with the checkpoint.
        metrics: Numbers to report, by name: floats or tensors of one element.
        skipped: Why this step must not be applied; None: it is to be.
        overflowed: Whether `check_finite` found that a gradient is not finite.
    """

    number: int
    names: Sequence[str]
    parameters: Sequence[Parameter]
    masters: Sequence[Parameter]
    ranks: StepRanks
    watch: NonFiniteWatch
    counters: dict[str, Json] = field(default_factory=dict)
    metrics: dict[str, float | Tensor] = field(default_factory=dict)
    skipped: str | None = None
    overflowed: bool = False

    @property
    def gradients(self) -> list[Tensor]:
        """Return the float32 gradients (of a `DTensor`, this rank's part), in the order of `names`."""
        return [local_tensor(master.grad) for master in self.masters if master.grad is not None]

    def skip(self, reason: str) -> None:
        """Leave out this step: no optimizer, no scheduler, gradients dropped. Later transforms are not called.

        Every rank must do so alike.
        """
        self.skipped = reason

    def check_finite(self) -> bool:
        """Return whether all gradients are finite on all ranks of the job, the same answer on each: one small all-reduce."""
        gradients = self.gradients
        # A finite 2-norm settles it, and it is the fastest pass over the numbers; its squares may overflow where they do not.
        found = self.ranks.any(~torch.isfinite(nn.utils.get_total_norm(gradients)))
        self.overflowed = found and self.ranks.any(~torch.isfinite(nn.utils.get_total_norm(gradients, math.inf)))
        return not self.overflowed

    def blame(self) -> str:
        """Return, on every rank, which parameter has a gradient that is not finite, and on which rank that began.

        The rank is known from the second such step in a row on (see `NonFiniteWatch`); before, all ranks hold the same averages.
        """
        origin = self.ranks.first_named(self.watch.first())
        if origin is not None:
            return f"gradient of {origin[1]} is not finite in the backward pass of rank {origin[0]}"
        own = next((name for name, gradient in zip(self.names, self.gradients, strict=True) if not gradient.isfinite().all()), None)
        found = self.ranks.first_named(own)
        return "gradients are not finite" if found is None else f"averaged gradient of {found[1]} is not finite on rank {found[0]}"


class GradientTransform(Protocol):
    """One link of the chain; called once for each step, in order, until one skips it."""

    def __call__(self, step: GradientStep, /) -> None:
        """Change `step.gradients` in place, or skip the step."""


def is_tensor_parallel(name: str, parameter: Parameter) -> bool:
    """Return whether `parameter` is marked as one part of several: `tensor_model_parallel` as Megatron does, or a sharded `DTensor`."""
    placements = getattr(parameter, "placements", ())
    return bool(getattr(parameter, "tensor_model_parallel", False)) or any(placement.is_shard() for placement in placements)


@dataclass(frozen=True, slots=True)
class ClipGradNorm:
    """Scales all gradients down so that their global norm is at most `max_norm`; the norm before that is the metric `grad_norm`.

    The norm is that of the whole replica: over tensor-parallel ranks, sharded parameters count on each and replicated ones once, and
    pipeline stages are added up, so that every rank clips by the same factor, as `torch.nn.utils.clip_grad_norm_` does on the dense
    model. A parameter with the attribute `shared` (Megatron: the copy of tied embeddings on the last stage) does not count.

    Attributes:
        max_norm: Above 0; `math.inf` only measures.
        norm_type: 1 or more; `math.inf` is the largest absolute value.
        is_sharded: Which parameters are sharded over the tensor-parallel ranks; default: those marked so, see `is_tensor_parallel`.

    Raises:
        ConfigError: A value is out of range.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013.
    """

    max_norm: float
    norm_type: float = 2.0
    is_sharded: IsSharded = is_tensor_parallel

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            do = "leave the transform out for no clipping, give math.inf only to measure"
            raise ConfigError("ClipGradNorm(max_norm=)", expected="a number above 0", got=self.max_norm, do=do)
        if not self.norm_type >= 1:
            raise ConfigError("ClipGradNorm(norm_type=)", expected="1 or more", got=self.norm_type, do="leave it out for the 2-norm")

    def __call__(self, step: GradientStep) -> None:
        """Clip in place."""
        norm = self._norm(step)
        step.metrics["grad_norm"] = norm
        # The same rule as torch.nn.utils.clip_grad_norm_: no branch on the value, so the device is not waited for.
        factor = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
        by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
        for gradient in step.gradients:
            by_device[gradient.device].append(gradient)
        for device, gradients in by_device.items():
            torch._foreach_mul_(gradients, factor.to(device))

    def _norm(self, step: GradientStep) -> Tensor:
        """Return float32[], the norm over all parts of the replica; alone, bit for bit torch's."""
        marked = zip(step.names, step.parameters, step.gradients, strict=True)
        counted = [gradient for name, parameter, gradient in marked if self._counts(step.ranks, name, parameter)]
        norm = nn.utils.get_total_norm(counted, self.norm_type) if counted else torch.zeros((), device=step.ranks.device)
        if not step.ranks.is_split:
            return norm
        if self.norm_type == math.inf:
            return step.ranks.total(norm, largest=True).float()
        return step.ranks.total(norm.double() ** self.norm_type).pow(1.0 / self.norm_type).float()

    def _counts(self, ranks: StepRanks, name: str, parameter: Parameter) -> bool:
        if getattr(parameter, "shared", False):
            return False
        return ranks.counts_replicated or self.is_sharded(name, parameter)


@dataclass(frozen=True, slots=True)
class SkipNonFinite:
    """Leaves out steps in which any gradient on any rank is NaN or infinite; every rank leaves out the same.

    Attributes:
        max_consecutive: How many steps in a row may be left out, 1 or more; the next one raises. Room enough for a float16 loss
            scale on its way down from 2**16.

    Raises:
        ConfigError: `max_consecutive` is not an integer of 1 or more.
    """

    max_consecutive: int = 20

    def __post_init__(self) -> None:
        check_int("SkipNonFinite(max_consecutive=)", self.max_consecutive, at_least=1, do="leave it out for 20")

    def __call__(self, step: GradientStep) -> None:
        """Skip the step if it is not finite.

        Raises:
            StallError: That is the case too often in a row, on every rank. It names the first parameter and the rank it began on.
        """
        counters = step.counters
        if step.check_finite():
            step.watch.disarm()
            counters["num_consecutive"] = 0
            return
        reason = step.blame()
        step.skip(reason)
        step.watch.arm()
        counters["num_skipped"] = counters.get("num_skipped", 0) + 1
        counters["num_consecutive"] = counters.get("num_consecutive", 0) + 1
        if counters["num_consecutive"] > self.max_consecutive:
            raise StallError(
                "optimizer",
                f"SkipNonFinite, step {step.number}: expected at most {self.max_consecutive} steps in a row with gradients that are not "
                f"finite, got {counters['num_consecutive']}, now: {reason}; look at the data of that rank, lower the learning rate, or "
                "go back to an earlier checkpoint",
            )
