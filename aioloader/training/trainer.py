"""A small data-parallel trainer: what a training loop around a loader has to get right, and no more."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import nn

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.training.groups.dp_group import DEFAULT_TIMEOUT_S, resolve_mesh
from aioloader.training.groups.process_group import local_device, process_group, stop_on_sigterm
from aioloader.training.loss import LossFunction, causal_lm_loss
from aioloader.training.reports import Scheduler, StepReport, TrainingLoader, TrainResult
from aioloader.training.run import TrainingRun
from aioloader.training.run_options import RunOptions
from aioloader.training.update import PrecisionManager

__all__ = ["Trainer"]


class Trainer:
    """Trains `model` on the micro-batches of `loader`, data parallel over the ranks of a torchrun job or alone.

    One step takes `accumulation` micro-batches on each rank. Its gradient is that of the sum of all losses of the global batch
    divided by the number of its target tokens, however the samples are cut into micro-batches and ranks. A step without any target
    changes nothing but is counted. If one rank has no batch left, all ranks drop the step that has begun and stop together. If the loader
    or the model of one rank fails, the others are told in the same step, by name.

    Checkpoints are made between steps only. With `resume`, training goes on from the latest complete one exactly, as long as nothing else
    (such as dropout) draws from a global random-number generator. On SIGTERM to any rank all ranks finish the step, save and return, so
    that the script ends with exit code 0. torchrun gives its ranks 30 s for that when it is stopped itself, and
    then ends with 1, whatever they do.

    Args:
        model: Moved to `device`; all ranks start with the parameters of rank 0.
        loader: Yields micro-batches; closed when training ends, whatever ends it.
        optimizer: Over the parameters of `model`; None where `precision` has it.
        precision: A `MixedPrecisionManager`, made of the model when that was on its device; it has the optimizer, the scheduler and the
            transforms of the gradients. Where it has no synchronizer, it gets one that accumulates in float32.
        mesh: Where this rank stands, data parallel only; default: from the process group, else from torchrun's environment. Without
            a process group, `train` makes one and removes it.
        scheduler: Stepped once after every update.
        loss_fn: Default: next-token loss of a causal language model (`causal_lm_loss`).
        max_steps: Steps to have done in the end, those before a resume included.
        accumulation: Micro-batches of this rank in a step; default: the loader's lanes on this rank, so that a step is one global batch.
        checkpoint_dir: Shared by all ranks; None: no checkpoints.
        checkpoint_every: Save after each so many steps; always saved at the end of training.
        keep_checkpoints: How many to keep; None: all.
        checkpoint_async: Copy the state to CPU memory between two steps, on rank 0, and write it in a thread while training goes on; one
            at a time. A failure is raised at the next step's end, or at the end of training.
        max_grad_norm: Clip the averaged gradient to this global norm.
        comm_dtype: Dtype of the gradients on the wire; see `GradientSynchronizer`.
        accumulate_dtype: Dtype of the sums of gradients; see there. Default: float32 with `precision`, else that of each parameter. With
            `torch.float64` for float32 parameters a run goes on bit for bit on another number of ranks.
        device: `"cpu"`, or `"cuda"` for the GPU of torchrun's `LOCAL_RANK`.
        prefetch_depth: Batches that are copied to the device ahead of their step; default: 2 for CUDA, 0 for the CPU.
        on_step: Called after each step, on every rank; one function or several, such as a `TensorBoardLogger`.
        eval_loader: What `evaluate` goes through after every `eval_every` steps, before the report; closed when training ends.
        eval_every: After how many steps.
        eval_batches: Batches of each rank in an evaluation at most; default: all.
        rank_table_every: After so many steps ranks tell each other how long they worked and waited; rank 0 logs a warning that names each
            rank which takes more than 1.5 times the median. None: never.
        resume: False: start afresh, which needs a `checkpoint_dir` without checkpoints.
        timeout_s: How long to wait for other ranks.

    Raises:
        ConfigError: An option is out of range or does not fit the loader or the mesh.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: TrainingLoader,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        max_steps: int,
        precision: PrecisionManager | None = None,
        mesh: Mesh | None = None,
        scheduler: Scheduler | None = None,
        loss_fn: LossFunction | None = None,
        accumulation: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int | None = 2,
        checkpoint_async: bool = False,
        max_grad_norm: float | None = None,
        comm_dtype: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        prefetch_depth: int | None = None,
        on_step: Callable[[StepReport], object] | Sequence[Callable[[StepReport], object]] = (),
        eval_loader: TrainingLoader | None = None,
        eval_every: int | None = None,
        eval_batches: int | None = None,
        rank_table_every: int | None = 50,
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
            precision=precision,
            loss_fn=loss_fn or causal_lm_loss,
            max_steps=max_steps,
            accumulation=_lanes_of_rank(loader, mesh) if accumulation is None else accumulation,
            checkpoint_dir=None if checkpoint_dir is None else Path(checkpoint_dir),
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            checkpoint_async=checkpoint_async,
            max_grad_norm=max_grad_norm,
            comm_dtype=comm_dtype,
            accumulate_dtype=torch.float32 if accumulate_dtype is None and precision is not None else accumulate_dtype,
            eval_loader=eval_loader,
            eval_every=eval_every,
            eval_batches=eval_batches,
            rank_table_every=rank_table_every,
            prefetch_depth=prefetch_depth,
            on_step=(on_step,) if callable(on_step) else tuple(on_step),
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
        loaders = [one for one in (options.loader, options.eval_loader) if one is not None]
        with ExitStack() as stack:
            for loader in loaders:
                stack.enter_context(closing(loader))
            request = stack.enter_context(stop_on_sigterm())
            device = local_device(self._device)
            stack.enter_context(process_group(options.mesh, device, options.timeout_s))
            _place(options, device)
            options.model.train()
            return TrainingRun(options, device, request).run()


def _place(options: RunOptions, device: torch.device) -> None:
    """Move the model to its device, where no copies of its parameters would stay behind."""
    elsewhere = {parameter.device for parameter in options.model.parameters()} - {device}
    if options.precision is not None and elsewhere:
        do = "call model.to(device) before making the precision manager"
        raise ConfigError("model", expected=f"all parameters on {device}", got=f"some on {elsewhere.pop()}", do=do)
    options.model.to(device)


def _lanes_of_rank(loader: TrainingLoader, mesh: Mesh) -> int:
    num_lanes: int | None = getattr(loader, "num_lanes", None)
    if num_lanes is None:
        return 1
    if num_lanes % mesh.dp_size:
        do = "set lanes to dp_size x accumulation"
        raise ConfigError("loader.num_lanes", expected=f"a multiple of dp_size {mesh.dp_size}", got=num_lanes, do=do)
    return num_lanes // mesh.dp_size
