"""What test_transforms.py looks at on two ranks. Run as `python -m tests.training.transform_cases results.json`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from aioloader.order.mesh import Mesh
from aioloader.training.precision.manager import MixedPrecisionManager
from aioloader.training.precision.parts import fused_adamw
from aioloader.training.precision.transforms import ClipGradNorm
from tests.training.gradient_cases import Weights
from tests.training.ranks import Store, run_ranks

SIZES = {"column": 6, "row": 4, "norm": 3}
"""Sharded over two tensor-parallel ranks: the first two; the last one lies on both."""


def own_values(name: str) -> Tensor:
    return torch.arange(1, SIZES[name] + 1).float() * {"column": 1.0, "row": -0.5, "norm": 0.25}[name]


def sharded_norms(rank: int) -> Any:
    """One SGD step on hand-made gradients: parameters end at minus the clipped gradient."""
    found = {}
    for norm_type in (1.0, 2.0, math.inf):
        model = Weights(column=SIZES["column"] // 2, row=SIZES["row"] // 2, norm=SIZES["norm"])
        for name in ("column", "row"):
            model.get_parameter(name).tensor_model_parallel = True  # type: ignore[attr-defined]
        manager = MixedPrecisionManager(
            model,
            lambda named: torch.optim.SGD(named, lr=1.0),
            compute_dtype=torch.float32,
            transforms=[ClipGradNorm(2.0, norm_type)],
            mesh=Mesh(tp_rank=rank, tp_size=2),
        )
        for name, parameter in model.named_parameters():
            values = own_values(name)
            parameter.grad = values.chunk(2)[rank].clone() if name != "norm" else values
        info = manager.step()
        found[str(norm_type)] = {"norm": info.grad_norm, "updates": {name: (-p).tolist() for name, p in model.named_parameters()}}
    return found


def pipeline_norm(rank: int) -> Any:
    """Each stage has a parameter of its own and a copy of the tied embedding, which counts on the first stage only."""
    model = Weights(own=2, tied=2)
    if rank == 1:
        model.get_parameter("tied").shared = True  # type: ignore[attr-defined]
    manager = MixedPrecisionManager(
        model,
        lambda named: torch.optim.SGD(named, lr=1.0),
        compute_dtype=torch.float32,
        transforms=[ClipGradNorm(math.inf)],
        mesh=Mesh(pp_rank=rank, pp_size=2),
    )
    model.get_parameter("own").grad = torch.tensor([3.0 + rank, 0.0])
    model.get_parameter("tied").grad = torch.tensor([0.0, 12.0])
    return manager.step().grad_norm


def sharded_dtensors(rank: int) -> Any:
    """A linear layer whose weight is a `DTensor` in halves, and whose gradients come from a real backward pass."""
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    for kind in ("dense", "sharded"):
        torch.manual_seed(3)
        layer = nn.Linear(6, 8)
        inputs: Tensor = torch.randn(5, 6).bfloat16()
        if kind == "sharded":
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), device_mesh, [Shard(0)]))
            layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), device_mesh, [Replicate()]))
            inputs = distribute_tensor(inputs, device_mesh, [Replicate()])
        manager = MixedPrecisionManager(
            layer, fused_adamw(lr=0.1), mesh=Mesh(tp_rank=rank, tp_size=2) if kind == "sharded" else Mesh(), transforms=[ClipGradNorm(0.5)]
        )
        norms = []
        for _ in range(3):
            manager.backward(layer(inputs).square().sum())
            norms.append(manager.step().grad_norm)
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in (layer.weight, layer.bias)]
        found[kind] = {"norms": norms, "weights": [weight.double().flatten().tolist() for weight in weights]}
    return found


CASES: tuple[Callable[[int], Any], ...] = (sharded_norms, pipeline_norm, sharded_dtensors)


def two_ranks(rank: int, store: Store) -> Any:
    return {case.__name__: case(rank) for case in CASES}


def main(path: str) -> None:
    Path(path).write_text(json.dumps(run_ranks(2, two_ranks)))


if __name__ == "__main__":
    main(sys.argv[1])
