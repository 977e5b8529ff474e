"""What test_gradients.py looks at: gradients of real ranks. Run as `python -m tests.training.gradient_cases results.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aioloader.errors import AioLoaderError
from aioloader.training.gradients.synchronizer import GradientSynchronizer
from tests.training.ranks import Store, run_ranks

NUM_MICRO_BATCHES = 8


class Weights(nn.Module):
    """Parameters without a forward pass; tests set their gradients by hand."""

    def __init__(self, **shapes: int) -> None:
        super().__init__()
        for name, size in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 3))


def network_loss(model: nn.Module, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    inputs, targets = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    return nn.functional.mse_loss(model(inputs), targets, reduction="sum")


def accumulate(rank: int, size: int, **options: Any) -> tuple[nn.Module, GradientSynchronizer]:
    """Run this rank's share of the micro-batches and synchronize on the last one."""
    model = network()
    synchronizer = GradientSynchronizer(model, **options)
    mine = [index for index in range(NUM_MICRO_BATCHES) if index % size == rank]
    for index in mine:
        with nullcontext() if index == mine[-1] else synchronizer.no_sync():
            network_loss(model, index).backward()  # type: ignore[no-untyped-call]
            synchronizer.sync_gradients()
    return model, synchronizer


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.double().tolist() for name, p in model.named_parameters()}


def values(tensor: Tensor) -> list[float]:
    return sorted({float(value) for value in tensor.flatten()})


def refusal(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except AioLoaderError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def reference(rank: int, store: Store) -> Any:
    model, synchronizer = accumulate(0, 1)
    return {"gradients": gradients(model), "num_rounds": synchronizer.num_rounds, "num_bytes": synchronizer.num_bytes}


def counted_collectives() -> list[int]:
    """Count calls of `torch.distributed.all_reduce` in the one element of the returned list, from now on."""
    calls, all_reduce = [0], dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = count
    return calls


def accumulation(rank: int) -> Any:
    found: dict[str, Any] = {}
    variants: dict[str, dict[str, Any]] = {"one": {}, "again": {}, "many": {"bucket_bytes": 100}, "bf16": {"comm_dtype": torch.bfloat16}}
    for name, options in variants.items():
        model, synchronizer = accumulate(rank, 2, **options)
        found[name] = {"gradients": gradients(model), "num_rounds": synchronizer.num_rounds, "num_bytes": synchronizer.num_bytes}
    return found


def drift(rank: int) -> Any:
    """Train 50 steps with gradients in float32 on the wire and 50 with bfloat16, and return the losses of this rank."""
    found = {}
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        model = network()
        synchronizer = GradientSynchronizer(model, comm_dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        losses = []
        for step in range(50):
            loss = network_loss(model, 2 * (step % 10) + rank)
            loss.backward()  # type: ignore[no-untyped-call]
            synchronizer.sync_gradients()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        found[name] = {"losses": losses, "num_bytes": synchronizer.num_bytes}
    return found


def last_micro_batch_only(rank: int) -> Any:
    model = Weights(p=1)
    synchronizer, calls, seen = GradientSynchronizer(model), counted_collectives(), []
    for index, value in enumerate([[1.0, 2.0], [10.0, 20.0]][rank]):
        with synchronizer.no_sync() if index == 0 else nullcontext():
            (model.get_parameter("p") * value).sum().backward()  # type: ignore[no-untyped-call]
            synchronizer.sync_gradients()
        seen.append([calls[0], synchronizer.num_rounds])
    return {"gradients": gradients(model), "seen": seen}


def uneven_use(rank: int) -> Any:
    model = Weights(here=1, both=1, nowhere=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    synchronizer = GradientSynchronizer(model)
    model.get_parameter("both").grad = torch.tensor([float(rank)])
    if rank == 0:
        model.get_parameter("here").grad = torch.tensor([4.0])
    synchronizer.sync_gradients()
    found = {"gradients": gradients(model)}
    optimizer.step()
    return found | {"parameters": {name: p.tolist() for name, p in model.named_parameters()}}


def no_gradient_at_all(rank: int) -> Any:
    model = Weights(p=1)
    if rank == 0:
        model.get_parameter("p").grad = torch.tensor([4.0])
    GradientSynchronizer(model).sync_gradients()
    return gradients(model)


def clip(rank: int) -> Any:
    model = Weights(p=2)
    parameter = model.get_parameter("p")
    synchronizer = GradientSynchronizer(model)
    with synchronizer.no_sync():
        parameter.grad = torch.tensor([[1.0, 0.0], [0.0, 2.0]][rank])
        refused_inside = refusal(lambda: synchronizer.clip_grad_norm(1.0))
    parameter.grad += torch.tensor([[2.0, 0.0], [0.0, 3.0]][rank])
    refused_before = refusal(lambda: synchronizer.clip_grad_norm(1.0))
    synchronizer.sync_gradients()
    norm = synchronizer.clip_grad_norm(1.0)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return {"refused": [refused_inside, refused_before], "norm": norm, "parameters": parameter.tolist()}


def tied_and_frozen(rank: int) -> Any:
    model = nn.Module()
    model.first = nn.Linear(4, 4, bias=False)
    model.second = nn.Linear(4, 4, bias=False)
    model.second.weight = model.first.weight
    model.frozen = nn.Parameter(torch.zeros(1000), requires_grad=False)
    model.frozen.grad = torch.full((1000,), float(rank))
    model.first.weight.grad = torch.full((4, 4), float(rank + 1))
    synchronizer = GradientSynchronizer(model)
    synchronizer.sync_gradients()
    found = {"gradient": values(model.first.weight.grad), "frozen": values(model.frozen.grad)}
    return found | {"num_bytes": synchronizer.num_bytes}


def refusals(rank: int) -> Any:
    sparse = Weights(p=3)
    sparse.get_parameter("p").grad = torch.ones(3).to_sparse()
    changed = Weights(p=3, q=3)
    changed.get_parameter("q").requires_grad_(False)
    synchronizer = GradientSynchronizer(changed)
    changed.get_parameter("q").requires_grad_(True)
    other_model = GradientSynchronizer(Weights(p=3 + rank))
    return {
        "sparse": refusal(GradientSynchronizer(sparse).sync_gradients),
        "changed": refusal(synchronizer.sync_gradients),
        "other_model": refusal(other_model.sync_gradients),
    }


def same_start(rank: int) -> Any:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.get_buffer("1.running_mean").fill_(rank + 5.0)
    own = [value.tolist() for value in model.state_dict().values()]
    GradientSynchronizer(model).broadcast_model()
    return {"own": own, "after": [value.tolist() for value in model.state_dict().values()]}


TWO_RANKS: dict[str, Callable[[int], Any]] = {
    case.__name__: case
    for case in (accumulation, drift, uneven_use, no_gradient_at_all, clip, tied_and_frozen, refusals, same_start, last_micro_batch_only)
}


def two_ranks(rank: int, store: Store) -> Any:
    return {name: case(rank) for name, case in TWO_RANKS.items()}


def half_precision(rank: int, store: Store) -> Any:
    found = {}
    for name, dtype, value, wire in (
        ("float16", torch.float16, 30_000.0, None),
        ("bfloat16", torch.bfloat16, 30_000.0, None),
        ("float32 over float16", torch.float32, 60_000.0, torch.float16),
    ):
        model = Weights(p=5).to(dtype)
        parameter = model.get_parameter("p")
        parameter.grad = torch.full((5,), value, dtype=dtype)
        GradientSynchronizer(model, comm_dtype=wire).sync_gradients()
        found[name] = {"values": values(parameter.grad), "dtype": str(parameter.grad.dtype)}
    return found


def missing_rank(rank: int, store: Store) -> Any:
    """Rank 1 takes part in the first round only, and stays alive until rank 0 has given up."""
    model = Weights(p=3)
    synchronizer = GradientSynchronizer(model, timeout_s=0.5)
    model.get_parameter("p").grad = torch.full((3,), float(rank))
    synchronizer.sync_gradients()
    if rank == 1:
        store.wait(["given up"])
        return None
    refused = refusal(lambda: synchronizer.sync_gradients(step=17))
    store.set("given up", "yes")
    return {"refused": refused, "gradients": gradients(model), "num_rounds": synchronizer.num_rounds}


def main(path: str) -> None:
    results = {
        "reference": run_ranks(1, reference)[0],
        "two_ranks": run_ranks(2, two_ranks),
        "half_precision": run_ranks(4, half_precision),
        "missing_rank": run_ranks(2, missing_rank),
    }
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
