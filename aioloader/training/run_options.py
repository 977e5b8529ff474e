"""The options of a training run, checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.training.loss import LossFunction
from aioloader.training.reports import Scheduler, StepReport, TrainingLoader
from aioloader.training.update import PrecisionManager

__all__ = ["RunOptions"]

_LEAST = {
    "max_steps": 0,
    "accumulation": 1,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "eval_every": 1,
    "eval_batches": 1,
    "rank_table_every": 1,
    "prefetch_depth": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `Trainer` was given, with defaults filled in; see there.

    Raises:
        ConfigError: An option is out of range.
    """

    model: nn.Module
    loader: TrainingLoader
    optimizer: torch.optim.Optimizer | None
    mesh: Mesh
    scheduler: Scheduler | None
    precision: PrecisionManager | None
    loss_fn: LossFunction
    max_steps: int
    accumulation: int
    checkpoint_dir: Path | None
    checkpoint_every: int | None
    keep_checkpoints: int | None
    checkpoint_async: bool
    max_grad_norm: float | None
    comm_dtype: torch.dtype | None
    accumulate_dtype: torch.dtype | None
    eval_loader: TrainingLoader | None
    eval_every: int | None
    eval_batches: int | None
    rank_table_every: int | None
    prefetch_depth: int | None
    on_step: Sequence[Callable[[StepReport], object]]
    resume: bool
    timeout_s: float

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            _check_at_least(name, getattr(self, name), least)
        if self.checkpoint_every is not None and self.checkpoint_dir is None:
            raise ConfigError("checkpoint_every", expected="a checkpoint_dir with it", got="none", do="give checkpoint_dir")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError("max_grad_norm", expected="a number above 0", got=self.max_grad_norm, do="leave it out for no clipping")
        if self.mesh != Mesh(dp_rank=self.mesh.dp_rank, dp_size=self.mesh.dp_size):
            do = "write the loop yourself around GradientSynchronizer"
            raise ConfigError("mesh", expected="data-parallel ranks only", got=self.mesh.describe(), do=do)
        self._check_evaluation()
        self._check_precision()

    def _check_evaluation(self) -> None:
        if (self.eval_loader is None) != (self.eval_every is None):
            got = "only one of them"
            raise ConfigError("eval_every", expected="eval_loader and eval_every, or neither", got=got, do="give both")
        if self.eval_loader is self.loader:
            do = "make a second Loader, of data that is not trained on"
            raise ConfigError("eval_loader", expected="a loader of its own", got="the one that is trained on", do=do)

    def _check_precision(self) -> None:
        if self.precision is None:
            if self.optimizer is None:
                raise ConfigError("optimizer", expected="one, or a precision manager", got="neither", do="give an optimizer")
            return
        if self.max_grad_norm is not None:
            do = "give the manager the transform ClipGradNorm"
            raise ConfigError("max_grad_norm", expected="none with a precision manager", got=self.max_grad_norm, do=do)
        for name in ("optimizer", "scheduler"):
            if getattr(self, name) is not None:
                do = f"give the {name} to the manager alone"
                raise ConfigError(name, expected="none with a precision manager, which owns it", got="one", do=do)


def _check_at_least(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(name, expected=f"an integer, {least} or more", got=repr(value), do="give a number of that size")
