"""A small data-parallel trainer: what a training loop around a loader has to get right, and no more."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.training.dp_group import DEFAULT_TIMEOUT_S, resolve_mesh
from aioloader.training.loss import causal_lm_loss
from aioloader.training.process_group import local_device, process_group, stop_on_sigterm
from aioloader.training.reports import Scheduler, StepReport, TrainingLoader, TrainResult
from aioloader.training.run import LossFunction, RunOptions, TrainingRun

__all__ = ["Trainer"]


class Trainer:
    """Trains `model` on the micro-batches of `loader`, data parallel over the ranks of a torchrun job or alone.

    One step takes `accumulation` micro-batches on each rank. Its gradient is that of the sum of all losses of the global batch
    divided by the number of its target tokens, however the samples are cut into micro-batches and ranks. A step without any target
    changes nothing but is counted. If one rank has no batch left, all ranks drop the step that has begun and stop together.

    Checkpoints are made between steps only. With `resume`, training goes on from the latest complete one exactly, as long as nothing else
    (such as dropout) draws from a global random-number generator. On SIGTERM to any rank all ranks finish the step, save and return.

    Args:
        model: Moved to `device`; all ranks start with the parameters of rank 0.
        loader: Yields micro-batches; closed when training ends, whatever ends it.
        optimizer: Over the parameters of `model`.
        mesh: Where this rank stands, data parallel only; default: from the process group, else from torchrun's environment. Without
            a process group, `train` makes one and removes it.
        scheduler: Stepped once after every update.
        loss_fn: Default: next-token loss of a causal language model (`causal_lm_loss`).
        max_steps: Steps to have done in the end, those before a resume included.
        accumulation: Micro-batches of this rank in a step; default: the loader's lanes on this rank, so that a step is one global batch.
        checkpoint_dir: Shared by all ranks; None: no checkpoints.
        checkpoint_every: Save after each so many steps; always saved at the end of training.
        keep_checkpoints: How many to keep; None: all.
        max_grad_norm: Clip the averaged gradient to this global norm.
        device: `"cpu"`, or `"cuda"` for the GPU of torchrun's `LOCAL_RANK`.
        on_step: Called after each step, on every rank.
        resume: False: start afresh, which needs a `checkpoint_dir` without checkpoints.
        timeout_s: How long to wait for other ranks.

    Raises:
        ConfigError: An option is out of range or does not fit the loader or the mesh.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: TrainingLoader,
        optimizer: torch.optim.Optimizer,
        *,
        max_steps: int,
        mesh: Mesh | None = None,
        scheduler: Scheduler | None = None,
        loss_fn: LossFunction | None = None,
        accumulation: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int | None = 2,
        max_grad_norm: float | None = None,
        device: str | torch.device = "cpu",
        on_step: Callable[[StepReport], object] | None = None,
        resume: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        mesh = resolve_mesh(mesh)
        self._device = device
        self._options = RunOptions(
            model=model,
            loader=loader,
            optimizer=optimizer,
            mesh=mesh,
            scheduler=scheduler,
            loss_fn=loss_fn or causal_lm_loss,
            max_steps=max_steps,
            accumulation=_lanes_of_rank(loader, mesh) if accumulation is None else accumulation,
            checkpoint_dir=None if checkpoint_dir is None else Path(checkpoint_dir),
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            max_grad_norm=max_grad_norm,
            on_step=on_step,
            resume=resume,
            timeout_s=timeout_s,
        )

    def train(self) -> TrainResult:
        """Train until `max_steps`, the end of the data on any rank, or SIGTERM, and return how it ended.

        Raises:
            ResumeError: The latest checkpoint does not fit this run.
            SynchronizationError: A rank failed, is missing, or has another model.
        """
        options = self._options
        with closing(options.loader), stop_on_sigterm() as request:
            device = local_device(self._device)
            with process_group(options.mesh, device, options.timeout_s):
                options.model.to(device)
                options.model.train()
                return TrainingRun(options, device, request).run()


def _lanes_of_rank(loader: TrainingLoader, mesh: Mesh) -> int:
    num_lanes: int | None = getattr(loader, "num_lanes", None)
    if num_lanes is None:
        return 1
    if num_lanes % mesh.dp_size:
        do = "set lanes to dp_size x accumulation"
        raise ConfigError("loader.num_lanes", expected=f"a multiple of dp_size {mesh.dp_size}", got=num_lanes, do=do)
    return num_lanes // mesh.dp_size
