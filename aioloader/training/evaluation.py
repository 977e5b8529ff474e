"""The loss on data that is not trained on, as if a single process had seen all of it once, and without a trace in the training."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.training.device_prefetch import DevicePrefetcher
from aioloader.training.groups.dp_group import DEFAULT_TIMEOUT_S, DataParallelGroup
from aioloader.training.loss import LossFunction, causal_lm_loss, check_loss
from aioloader.training.reports import Evaluation, TrainingLoader

__all__ = ["evaluate"]


@dataclass(slots=True)
class _Sums:
    num_targets: float = 0.0
    loss: float = 0.0
    num_tokens: int = 0
    num_batches: int = 0
    interrupted: bool = False


def evaluate(
    model: nn.Module,
    loader: TrainingLoader,
    loss_fn: LossFunction = causal_lm_loss,
    *,
    max_batches: int | None = None,
    device: str | torch.device = "cpu",
    mesh: Mesh | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Return the loss per target token of everything that the loaders of all ranks deliver; call it on every rank.

    Ranks need not have equally many batches: each goes through its own, and their sums are added once, at the end. Fillers count for
    nothing. With a `Loader`, take `end="pad"`: "drop" leaves tails out, and "repeat" is refused, for it would count records twice. A loader
    with `set_epoch` is set to epoch 0, so that every evaluation sees the same data.

    The model is in evaluation mode inside, without gradients, and as it was afterwards. Python's, NumPy's and torch's global random-number
    generators are put back too: training goes on as if nothing had been.

    Args:
        model: Already on `device`.
        loader: The batches of this rank; it stays open.
        loss_fn: (model, batch) -> (sum of the losses, number of targets).
        max_batches: Batches of this rank at most; None: all.
        device: Where batches are moved to.
        mesh: Where this rank stands; default: from the process group, else from torchrun's environment.
        group: The data-parallel process group; default: all ranks.
        timeout_s: How long to wait for the other ranks, which may have more batches.
        should_stop: Asked before each batch; once it says so on any rank, the result is None on all.

    Raises:
        ConfigError: Records were delivered twice, or `max_batches` is out of range.
        SynchronizationError: Another rank failed or is missing.
    """
    if max_batches is not None and max_batches < 1:
        raise ConfigError("evaluate(max_batches=)", expected="1 or more, or None for all", got=max_batches, do="leave it out for all")
    dp = DataParallelGroup.resolve(mesh, group, timeout_s)
    device = torch.device(device)
    with dp.together("evaluate"), _evaluation_mode(model), _random_states_kept(device):
        sums = _add_up(model, loader, loss_fn, max_batches, device, should_stop)
        _refuse_repeats(loader)
    numbers = [sums.num_targets, sums.loss, sums.num_tokens, sums.num_batches, int(sums.interrupted)]
    targets, loss, tokens, batches, interrupted = dp.reduce_numbers(numbers, "evaluate, sums")
    if interrupted:
        return None
    loss = loss / targets if targets else math.nan
    return Evaluation(loss=loss, num_targets=int(targets), num_tokens=int(tokens), num_batches=int(batches))


@torch.no_grad()
def _add_up(
    model: nn.Module,
    loader: TrainingLoader,
    loss_fn: LossFunction,
    max_batches: int | None,
    device: torch.device,
    should_stop: Callable[[], bool],
) -> _Sums:
    set_epoch = getattr(loader, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(0)
    sums = _Sums()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    with closing(DevicePrefetcher(loader, device)) as batches:
        for batch in batches:
            if should_stop():
                sums.interrupted = True
                break
            if not batch.is_filler:
                loss, num_targets = loss_fn(model, batch)
                check_loss(loss)
                totals[0] += num_targets
                totals[1] += loss.double().squeeze()
                sums.num_tokens += batch.num_tokens
            sums.num_batches += not batch.is_filler
            if sums.num_batches == max_batches:
                break
    sums.num_targets, sums.loss = totals.tolist()
    return sums


def _refuse_repeats(loader: Any) -> None:
    """Refuse what a `Loader` says about its pass: records that were delivered once more to even out the ranks."""
    stats = getattr(loader, "stats", None)
    repeated = stats().get("records", {}).get("repeated_records", 0) if stats is not None else 0
    if repeated:
        raise ConfigError("evaluate(loader=)", expected="every record once", got=f"{repeated} of them twice", do='use Loader(end="pad")')


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode and each back as it was: some may be in evaluation mode for good."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
