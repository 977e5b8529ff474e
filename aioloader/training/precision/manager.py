"""Trains narrow parameters with float32 precision: bfloat16 or float16 in the model, float32 where the optimizer adds up.

    forward, backward                    parameters bf16, activations bf16       .grad bf16
    synchronizer.sync_gradients()        averages over the data-parallel ranks   bf16, or its accumulate dtype
    manager.step()
      1. finalize                        averages -> float32, onto master.grad   float32
      2. unscale                         x gradient_scale / loss scale           float32
      3. transforms, in order            SkipNonFinite, ClipGradNorm, yours      float32
      4. optimizer.step()                on the masters                          float32
      5. copy back                       parameter = master.to(dtype)            bf16
      6. zero                            every .grad is None
      7. scheduler.step()                once

A step that a transform skips does neither 4, 5 nor 7. Every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.training.groups.broadcast import broadcast_tensors
from aioloader.training.groups.dp_group import DataParallelGroup
from aioloader.training.precision.chain import TransformChain
from aioloader.training.precision.loss_scaling import DynamicLossScale, make_loss_scaler
from aioloader.training.precision.masters import KeepFloat32, MasterParameters
from aioloader.training.precision.nonfinite import NonFiniteWatch
from aioloader.training.precision.parts import (
    OptimizerFactory,
    SchedulerFactory,
    Synchronizer,
    SynchronizerFactory,
    make_optimizer,
    make_scheduler,
    make_synchronizer,
)
from aioloader.training.precision.state import FORMAT, check_same, dtype_name, load_optimizer
from aioloader.training.precision.step_ranks import StepRanks
from aioloader.training.precision.transforms import ClipGradNorm, GradientStep, GradientTransform, SkipNonFinite
from aioloader.training.reports import Scheduler

__all__ = ["MixedPrecisionManager", "StepInfo"]

_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """What one call of `step` or `skip` did; the same on every rank.

    Attributes:
        number: Of the step, from 1, those left out counted.
        skipped: Why nothing was updated; None where it was.
        loss_scale: The scale that this step's losses had; 1 without loss scaling.
        metrics: What the transforms reported, by name.
    """

    number: int
    skipped: str | None
    loss_scale: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def grad_norm(self) -> float | None:
        """Return the global norm before clipping; None if no transform measured it, or the step was skipped before."""
        return self.metrics.get("grad_norm")


class MixedPrecisionManager:
    """Keeps float32 masters of a model's parameters, steps them, and keeps the narrow parameters equal to `master.to(dtype)`.

        manager = MixedPrecisionManager(model, fused_adamw(lr=1e-3), synchronizer=GradientSynchronizer)
        for batch in micro_batches[:-1]:
            with manager.synchronizer.no_sync():
                manager.backward(loss(batch))
        manager.backward(loss(micro_batches[-1]))
        manager.synchronizer.sync_gradients()
        manager.step(gradient_scale=1 / len(micro_batches))

    Making it casts the model in place: its trainable and frozen floating-point parameters to `compute_dtype`, not its buffers. The
    masters keep the values from before the cast, so give it the float32 model. Memory for each trainable parameter: 4 bytes for
    the master beside the 2 of the parameter, and 4 for its float32 gradient during `step` only.

    Args:
        model: Shared (tied) parameters get one master; frozen ones none.
        optimizer: A function that makes one of (name, master) pairs, such as `fused_adamw(lr=1e-3)`; or an optimizer over the model's
            parameters that has not stepped, which goes on with the masters in their place.
        compute_dtype: bfloat16, float16, or float32, where each parameter is its own master.
        keep_fp32: Which parameters stay float32 in the model, such as `norm_or_router`.
        synchronizer: Where the averaged gradients come from: a `GradientSynchronizer`, or what makes one of the model once it is cast;
            None: the `.grad` of the parameters. One made before the cast is refused: it was laid out for other dtypes.
        transforms: Called in this order on the float32 gradients; see `GradientTransform`.
        scheduler: Stepped once for each optimizer step; or a function that makes one of the optimizer.
        loss_scale: `"dynamic"`, a `DynamicLossScale`, or a fixed number; None: dynamic for float16, none otherwise. Where there is
            one, steps that overflow are skipped also without `SkipNonFinite` among the transforms.
        mesh: Where this rank stands; default: from the process group, all of it data parallel.
        model_parallel_group: The ranks that hold parts of the same replica (tp x pp); default: all ranks, where that is so.

    Attributes:
        optimizer: Works on the masters.
        scheduler: As given or made.
        synchronizer: As given or made.
        num_steps: Optimizer steps done.
        num_skipped: Steps left out.
        last_step: What the last step did; None before the first.

    Raises:
        ConfigError: An argument does not fit the model or the process group.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | OptimizerFactory,
        *,
        compute_dtype: torch.dtype = torch.bfloat16,
        keep_fp32: KeepFloat32 | None = None,
        synchronizer: Synchronizer | SynchronizerFactory | None = None,
        transforms: Sequence[GradientTransform] = (SkipNonFinite(), ClipGradNorm(1.0)),
        scheduler: Scheduler | SchedulerFactory | None = None,
        loss_scale: DynamicLossScale | float | str | None = None,
        mesh: Mesh | None = None,
        model_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        if compute_dtype not in _COMPUTE_DTYPES:
            do = "choose one of them"
            raise ConfigError("compute_dtype", expected="torch.bfloat16, torch.float16 or torch.float32", got=compute_dtype, do=do)
        self._chain = TransformChain(transforms, make_loss_scaler(loss_scale, compute_dtype))
        dtypes_before = [parameter.dtype for parameter in model.parameters()]
        self._masters = MasterParameters(model, compute_dtype, keep_fp32)
        was_cast = dtypes_before != [parameter.dtype for parameter in model.parameters()]
        self.optimizer = make_optimizer(optimizer, self._masters)
        self.scheduler = make_scheduler(scheduler, self.optimizer)
        self.synchronizer = make_synchronizer(synchronizer, model, was_cast=was_cast)
        self._ranks = StepRanks.resolve(mesh, model_parallel_group, self._masters.compute[0].device)
        self._watch = NonFiniteWatch(self._masters.names, self._masters.compute)
        self.num_steps = 0
        self.num_skipped = 0
        self.last_step: StepInfo | None = None

    def __repr__(self) -> str:
        dtype = dtype_name(self._masters.compute_dtype)
        return (
            f"MixedPrecisionManager({dtype}, parameters={len(self._masters.names)}, loss_scale={self.loss_scale:g}, "
            f"num_steps={self.num_steps}, num_skipped={self.num_skipped})"
        )

    @property
    def loss_scale(self) -> float:
        """Return what `scale` multiplies by; 1 without loss scaling."""
        return self._chain.loss_scale

    def masters(self) -> dict[str, Parameter]:
        """Return the float32 masters by qualified name: the weights to export."""
        return dict(self._masters.named_masters())

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, to call `backward` on; `step` takes the scale out again."""
        return loss if self._chain.scaler is None else loss * self._chain.loss_scale

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the scaled loss."""
        self.scale(loss).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, *, gradient_scale: float = 1.0) -> StepInfo:
        """Update masters and parameters from the averaged gradients, or skip that; call it on every rank, after `sync_gradients`.

        Gradients are dropped in either case, also when an error is raised.

        Args:
            gradient_scale: The gradients are multiplied by it, in float32: 1 / (number of micro-batches) for losses that are means,
                dp_size / (number of target tokens) for sums.

        Raises:
            ConfigError: A gradient does not fit its parameter, or the synchronizer has not averaged.
            StallError: `SkipNonFinite` has skipped too many steps in a row.
            SynchronizationError: A rank is missing.
        """
        scale = self.loss_scale
        try:
            step = self._finalize()
            factor = gradient_scale / scale
            if factor != 1.0 and step.gradients:
                torch._foreach_mul_(step.gradients, factor)
            self._chain.run(step)
            if step.skipped is None:
                self.optimizer.step()
                self._masters.copy_to_compute()
        finally:
            self._masters.zero_grad()
        if step.skipped is None and self.scheduler is not None:
            self.scheduler.step()
        return self._done(StepInfo(number=step.number, skipped=step.skipped, loss_scale=scale, metrics=_as_numbers(step.metrics)))

    def skip(self, reason: str) -> StepInfo:
        """Leave out one step, such as one without a target token: drop the gradients and update nothing. For every rank alike.

        Call it after `sync_gradients` or `discard_gradients` of the synchronizer, which ends the step there.
        """
        self._masters.zero_grad()
        return self._done(StepInfo(number=self._next_number, skipped=reason, loss_scale=self.loss_scale))

    def broadcast_masters(self, group: dist.ProcessGroup | None = None) -> None:
        """Give every rank of the data-parallel `group` (default: all) the masters of its rank 0, and parameters made of them.

        `GradientSynchronizer.broadcast_model` does the rest: frozen parameters and buffers.

        Raises:
            SynchronizationError: A rank is missing or has another model.
        """
        broadcast_tensors(DataParallelGroup.resolve(None, group), self._masters.named_masters(), "broadcast_masters")
        self._masters.copy_to_compute()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, beside the model's buffers and frozen parameters.

        Tensors (masters and optimizer state, not copied) and JSON-like values. `load_state_dict` into a new manager goes on bit for
        bit, at the border of an optimizer step.
        """
        return {
            "format": FORMAT,
            "compute_dtype": dtype_name(self._masters.compute_dtype),
            "masters": {name: master.detach() for name, master in self._masters.named_masters()},
            "optimizer_class": type(self.optimizer).__name__,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scheduler_class": type(self.scheduler).__name__,
            **self._chain.state_dict(),
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, bit for bit, and make the model's parameters of its masters.

        Raises:
            ResumeError: It was saved with another compute dtype, model, optimizer, scheduler, loss scale or chain of transforms; both
                sides of each difference are named. Nothing was changed.
        """
        check_same(state, self.state_dict())
        self._masters.load(state["masters"])
        self._masters.zero_grad()
        load_optimizer(self.optimizer, state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self._chain.load_state_dict(state)
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self.last_step = None

    @property
    def _next_number(self) -> int:
        return self.num_steps + self.num_skipped + 1

    def _finalize(self) -> GradientStep:
        """Return the step with the averaged gradients, float32, on the masters."""
        masters = self._masters
        if self.synchronizer is None:
            averaged = [(parameter, parameter.grad) for parameter in masters.compute if parameter.grad is not None]
        else:
            averaged = list(self.synchronizer.gradients())
        used = masters.assign_gradients(averaged)
        return GradientStep(
            number=self._next_number,
            names=[masters.names[index] for index in used],
            parameters=[masters.compute[index] for index in used],
            masters=[masters.masters[index] for index in used],
            ranks=self._ranks,
            watch=self._watch,
        )

    def _done(self, info: StepInfo) -> StepInfo:
        self.num_steps += info.skipped is None
        self.num_skipped += info.skipped is not None
        self.last_step = info
        return info


def _as_numbers(metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
