"""The parts of a mixed-precision step, made or taken over: optimizer over the masters, scheduler, synchronizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from aioloader.errors import ConfigError
from aioloader.training.precision.masters import MasterParameters
from aioloader.training.reports import Scheduler

__all__ = [
    "NamedMasters",
    "OptimizerFactory",
    "SchedulerFactory",
    "Synchronizer",
    "SynchronizerFactory",
    "fused_adamw",
    "make_optimizer",
    "make_scheduler",
    "make_synchronizer",
]

NamedMasters: TypeAlias = Sequence[tuple[str, Parameter]]

OptimizerFactory: TypeAlias = Callable[[NamedMasters], torch.optim.Optimizer]
"""(qualified name, float32 master) pairs -> optimizer over all of them; torch's optimizers take the pairs as they are."""

SchedulerFactory: TypeAlias = Callable[[torch.optim.Optimizer], Scheduler]


SynchronizerFactory: TypeAlias = Callable[[nn.Module], "Synchronizer"]


class Synchronizer(Protocol):
    """What the manager and the loop around it use of a `GradientSynchronizer`."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate only, inside."""

    def sync_gradients(self, step: int | None = None) -> None:
        """Average the gradients over the ranks."""

    def gradients(self) -> Iterable[tuple[Parameter, Tensor]]:
        """Return each parameter of the model that has a gradient, with its gradient averaged over the ranks."""


def fused_adamw(**options: Any) -> OptimizerFactory:
    """Return a factory of `torch.optim.AdamW`, in one kernel over all parameters where their devices have it, else over lists.

    Args:
        options: Of `torch.optim.AdamW`, such as `lr`, `betas`, `weight_decay`.
    """

    def make(named: NamedMasters) -> torch.optim.Optimizer:
        try:
            return torch.optim.AdamW(named, fused=True, **options)
        except RuntimeError:  # how torch says that a device has no such kernel
            return torch.optim.AdamW(named, **options)

    return make


def make_optimizer(optimizer: torch.optim.Optimizer | OptimizerFactory, masters: MasterParameters) -> torch.optim.Optimizer:
    """Return an optimizer over exactly the masters: from a factory, or one made for the model, whose parameters are exchanged.

    Raises:
        ConfigError: It is neither, it has taken steps already, or it has not exactly the trainable parameters of the model.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        _exchange_parameters(optimizer, masters)
    elif callable(optimizer):
        optimizer = optimizer(masters.named_masters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "optimizer",
            expected="a torch optimizer, or a function that makes one of (name, master) pairs",
            got=type(optimizer).__name__,
            do="give e.g. fused_adamw(lr=1e-3)",
        )
    _check_covers(optimizer, masters)
    return optimizer


def make_scheduler(scheduler: Scheduler | SchedulerFactory | None, optimizer: torch.optim.Optimizer) -> Scheduler | None:
    """Return the scheduler, made for `optimizer` where it is a factory."""
    if scheduler is None or hasattr(scheduler, "step"):
        return cast("Scheduler | None", scheduler)
    return scheduler(optimizer)


def make_synchronizer(synchronizer: Synchronizer | SynchronizerFactory | None, model: nn.Module, *, was_cast: bool) -> Synchronizer | None:
    """Return the synchronizer, made for `model` where it is a factory (a function or class without bound `gradients`).

    Raises:
        ConfigError: It was made before the model `was_cast`, so that its buffers have other dtypes.
    """
    if synchronizer is None:
        return None
    if isinstance(synchronizer, type) or not hasattr(synchronizer, "gradients"):
        return cast("SynchronizerFactory", synchronizer)(model)
    if was_cast:
        raise ConfigError(
            "synchronizer",
            expected="one made of the model as it is cast",
            got="one that was made before",
            do="give what makes it, such as synchronizer=lambda model: GradientSynchronizer(model, mesh)",
        )
    return cast("Synchronizer", synchronizer)


def _exchange_parameters(optimizer: torch.optim.Optimizer, masters: MasterParameters) -> None:
    if optimizer.state:
        raise ConfigError(
            "optimizer",
            expected="one that has not stepped yet",
            got=f"state of {len(optimizer.state)} parameters",
            do="make the manager first, then load the state into the manager",
        )
    for group in optimizer.param_groups:
        group["params"] = [masters.master_of(parameter) for parameter in group["params"]]


def _check_covers(optimizer: torch.optim.Optimizer, masters: MasterParameters) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad}
    missing = [name for name, master in masters.named_masters() if id(master) not in held]
    num_foreign = len(held - {id(master) for master in masters.masters})
    if missing or num_foreign:
        got = f"{len(missing)} of them missing (first {missing[0]})" if missing else f"{num_foreign} other parameters"
        do = "give it all of model.parameters() before the manager casts them, and freeze what is not to be trained"
        raise ConfigError("optimizer", expected="exactly the trainable parameters of the model", got=got, do=do)
