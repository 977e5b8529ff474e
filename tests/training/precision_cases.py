"""What the tests of mixed precision look at on two ranks. Run as `python -m tests.training.precision_cases results.json`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aioloader.order.mesh import Mesh
from aioloader.training.gradients.synchronizer import GradientSynchronizer
from aioloader.training.precision.loss_scaling import DynamicLossScale
from aioloader.training.precision.manager import MixedPrecisionManager
from aioloader.training.precision.parts import fused_adamw
from aioloader.training.precision.transforms import ClipGradNorm, SkipNonFinite
from tests.training.gradient_cases import Weights, network, refusal
from tests.training.ranks import Store, run_ranks


def bits(model: nn.Module) -> dict[str, Any]:
    """Return the values of all parameters, exactly."""
    return {name: parameter.double().flatten().tolist() for name, parameter in model.named_parameters()}


def loss_of(model: nn.Module, index: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    inputs, targets = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    return nn.functional.mse_loss(model(inputs.to(dtype)).float(), targets)


def same_parameters(rank: int) -> Any:
    """Five steps of two micro-batches each, on other data on each rank."""
    model = network()
    before = bits(model)
    manager = MixedPrecisionManager(model, fused_adamw(lr=0.01), synchronizer=GradientSynchronizer)
    assert manager.synchronizer is not None
    norms = []
    for step in range(5):
        for micro_batch in range(2):
            with manager.synchronizer.no_sync() if micro_batch == 0 else nullcontext():
                manager.backward(loss_of(model, 100 * step + 10 * micro_batch + rank, torch.bfloat16))
        manager.synchronizer.sync_gradients()
        norms.append(manager.step(gradient_scale=0.5).grad_norm)
    masters = {name: master.tolist() for name, master in manager.masters().items()}
    return {"before": before, "parameters": bits(model), "masters": masters, "norms": norms}


def not_finite_on_one_rank(rank: int) -> Any:
    """Rank 1's data are broken from the second step on; three steps in a row are too many."""
    model = network()
    transforms = (SkipNonFinite(max_consecutive=2), ClipGradNorm(1.0))
    manager = MixedPrecisionManager(model, fused_adamw(lr=0.01), synchronizer=GradientSynchronizer, transforms=transforms)
    assert manager.synchronizer is not None
    seen: list[Any] = []

    def step(broken: bool) -> None:
        loss = loss_of(model, rank, torch.bfloat16)
        manager.backward(loss * math.nan if broken else loss)
        assert manager.synchronizer is not None
        manager.synchronizer.sync_gradients()
        seen.append([manager.step().skipped, bits(model), all(p.grad is None for p in model.parameters())])

    for broken in (False, True, True, False, True, True):
        step(broken and rank == 1)
    return {"seen": seen, "refused": refusal(lambda: step(rank == 1)), "num_skipped": manager.num_skipped, "after": bits(model)}


def overflow_on_one_rank(rank: int) -> Any:
    """Float16: the scaled loss of rank 1 overflows twice; both ranks halve their scale."""
    model = network()
    manager = MixedPrecisionManager(
        model,
        fused_adamw(lr=0.01),
        compute_dtype=torch.float16,
        synchronizer=GradientSynchronizer,
        loss_scale=DynamicLossScale(initial=2.0**12, growth_interval=2),
    )
    assert manager.synchronizer is not None
    seen = []
    for factor in (1.0, 1e6, 1e6, 1.0, 1.0):
        manager.backward(loss_of(model, rank, torch.float16) * (factor if rank == 1 else 1.0))
        manager.synchronizer.sync_gradients()
        info = manager.step()
        seen.append([info.loss_scale, info.skipped is None])
    return {"seen": seen, "scale": manager.loss_scale, "parameters": bits(model)}


def large_float16(rank: int) -> Any:
    """The sum over the ranks does not fit float16, the average does."""
    model = Weights(p=3).half()
    manager = MixedPrecisionManager(
        model,
        lambda named: torch.optim.SGD(named, lr=1.0),
        compute_dtype=torch.float16,
        loss_scale=1.0,
        transforms=(),
        synchronizer=GradientSynchronizer,
    )
    model.get_parameter("p").grad = torch.full((3,), 60_000.0, dtype=torch.float16)
    assert manager.synchronizer is not None
    manager.synchronizer.sync_gradients()
    manager.step(gradient_scale=2.0**-10)
    return manager.masters()["p"].tolist()


def broadcast(rank: int) -> Any:
    torch.manual_seed(rank)
    model = nn.Linear(2, 2)
    manager = MixedPrecisionManager(model, fused_adamw(lr=0.1))
    own = manager.masters()["weight"].tolist()
    manager.broadcast_masters()
    rounded = torch.equal(model.weight, manager.masters()["weight"].bfloat16())
    return {"own": own, "after": manager.masters()["weight"].tolist(), "rounded": rounded}


def refusals(rank: int) -> Any:
    def make(mesh: Mesh) -> None:
        MixedPrecisionManager(nn.Linear(2, 2), fused_adamw(lr=0.1), mesh=mesh)

    return {
        "model group": refusal(lambda: make(Mesh(tp_rank=rank, tp_size=2, pp_size=2))),
        "synchronizer": refusal(lambda: early_synchronizer()),
    }


def early_synchronizer() -> None:
    model = nn.Linear(2, 2)
    MixedPrecisionManager(model, fused_adamw(lr=0.1), synchronizer=GradientSynchronizer(model))


CASES: tuple[Callable[[int], Any], ...] = (
    same_parameters,
    not_finite_on_one_rank,
    overflow_on_one_rank,
    large_float16,
    broadcast,
    refusals,
)


def two_ranks(rank: int, store: Store) -> Any:
    return {case.__name__: case(rank) for case in CASES}


def main(path: str) -> None:
    Path(path).write_text(json.dumps(run_ranks(2, two_ranks)))


if __name__ == "__main__":
    main(sys.argv[1])
