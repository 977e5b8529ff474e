"""What test_overlap.py looks at: buckets that leave in backward. Run as `python -m tests.training.overlap_cases results.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from aioloader.training.gradients.synchronizer import GradientSynchronizer
from aioloader.training.groups.dp_group import DataParallelGroup
from tests.training.gradient_cases import Weights, gradients, network, network_loss, refusal
from tests.training.ranks import Store, run_ranks

SMALL = 100
"""Bytes in a bucket: each matrix of the network has one of its own."""


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def started(**options: Any) -> tuple[nn.Module, GradientSynchronizer]:
    """Return a network whose synchronizer sends from the first backward on."""
    model = network()
    synchronizer = GradientSynchronizer(model, bucket_bytes=SMALL, **options)
    synchronizer.broadcast_model()
    return model, synchronizer


def sent_by_backward(rank: int) -> Any:
    model, synchronizer = started()
    found = []
    for step in range(3):
        with synchronizer.no_sync():
            backward(network_loss(model, 4 * step + rank))
        before = synchronizer.num_bytes
        backward(network_loss(model, 4 * step + 2 + rank))
        sent = synchronizer.num_bytes - before
        synchronizer.sync_gradients()
        found.append({"sent": sent, "rest": synchronizer.num_bytes - before - sent, "gradients": gradients(model)})
        model.zero_grad(set_to_none=step == 0)
    stats = synchronizer.stats()
    measured = {"exposed_s": stats.exposed_s, "communication_s": stats.communication_s, "overlap": stats.overlap}
    return {"steps": found, "rounds": stats.num_rounds, "measured": measured}


def several_backwards(rank: int) -> Any:
    model, synchronizer = started()
    for index in range(rank, 8, 2):
        backward(network_loss(model, index))
    synchronizer.sync_gradients()
    return {"gradients": gradients(model), "num_late_buckets": synchronizer.stats().num_late_buckets}


def late_on_one_rank(rank: int) -> Any:
    model = Weights(p=1, q=1)
    synchronizer = GradientSynchronizer(model, bucket_bytes=4)
    synchronizer.broadcast_model()
    p, q = model.get_parameter("p"), model.get_parameter("q")
    backward((p + q).sum())
    if rank == 0:
        backward((4 * p).sum())
    synchronizer.sync_gradients()
    return gradients(model) | {"num_late_buckets": synchronizer.stats().num_late_buckets}


def other_collectives_between(rank: int) -> Any:
    """Rank 0 uses all parameters and sends all in backward, rank 1 all but the one that is sent first, and so nothing."""
    model = Weights(first=1, last=1)
    synchronizer, group = GradientSynchronizer(model, bucket_bytes=4), DataParallelGroup.resolve()
    synchronizer.broadcast_model()
    found = []
    for _ in range(2):
        loss = model.get_parameter("first") * 2
        backward((loss + model.get_parameter("last")).sum() if rank == 0 else loss.sum())
        total = group.reduce_numbers([rank + 1.0], "counts between")
        synchronizer.sync_gradients()
        found.append(gradients(model) | {"total": total})
        model.zero_grad()
    return found


def only_under_no_sync(rank: int) -> Any:
    model = Weights(early=1, always=1)
    synchronizer = GradientSynchronizer(model)
    synchronizer.broadcast_model()
    with synchronizer.no_sync():
        backward((model.get_parameter("early") * (rank + 1) + model.get_parameter("always")).sum())
    backward(model.get_parameter("always").sum())
    synchronizer.sync_gradients()
    return gradients(model)


class Tied(nn.Module):
    """One matrix used in three places, two of them in segments that are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.matrix = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 1)
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.matrix(inputs)
        for _ in range(2):
            hidden = checkpoint(lambda x: self.matrix(x).tanh(), hidden, use_reentrant=self.reentrant)
        return self.head(hidden).sum()  # type: ignore[no-any-return]


def tied_in_checkpoints(rank: int) -> Any:
    found = {}
    for name, reentrant in (("reentrant", True), ("not reentrant", False)):
        model = Tied(reentrant)
        synchronizer = GradientSynchronizer(model)
        synchronizer.broadcast_model()
        inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(5))
        backward(model(inputs[rank]))
        synchronizer.sync_gradients()
        plain = Tied(reentrant)
        backward((plain(inputs[0]) + plain(inputs[1])) / 2)
        ours, expected = gradients(model), gradients(plain)
        found[name] = max(float((torch.tensor(ours[key]) - torch.tensor(expected[key])).abs().max()) for key in expected)
    return found


def compiled(rank: int) -> Any:
    model = network()
    synchronizer = GradientSynchronizer(model, bucket_bytes=SMALL)
    synchronizer.broadcast_model()
    fast = torch.compile(model, backend="aot_eager")
    for index in (rank, rank + 2):
        with synchronizer.no_sync() if index < 2 else nullcontext():
            backward(network_loss(fast, index))  # type: ignore[arg-type]
    sent = synchronizer.num_bytes
    synchronizer.sync_gradients()
    return {"gradients": gradients(model), "sent": sent}


class Refuses(torch.autograd.Function):
    """An identity whose backward fails."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ZeroDivisionError("in backward")


def error_in_backward(rank: int, end: str, *, is_first: bool = False) -> Any:
    """Backward of rank 1 fails half way, in a step that sends from hooks or, as the first does, at its end; the next is a good one."""
    model = Weights(first=1, last=1)
    first, last = model.get_parameter("first"), model.get_parameter("last")
    synchronizer = GradientSynchronizer(model, bucket_bytes=4)
    if not is_first:
        synchronizer.broadcast_model()
    middle = Refuses.apply(first * 1.0) if rank == 1 else first  # type: ignore[no-untyped-call]
    ending = synchronizer.sync_gradients
    try:
        backward((middle + last).sum())
    except ZeroDivisionError:
        ending = getattr(synchronizer, end)
    refused = refusal(lambda: ending(5))
    dropped = gradients(model)
    model.zero_grad()
    backward((first * 2 + last * rank).sum())
    synchronizer.sync_gradients()
    return {"refused": refused, "dropped": dropped, "gradients": gradients(model)}


def failed_and_synchronized(rank: int) -> Any:
    return error_in_backward(rank, "sync_gradients")


def failed_and_discarded(rank: int) -> Any:
    return error_in_backward(rank, "discard_gradients")


def failed_at_first(rank: int) -> Any:
    return error_in_backward(rank, "sync_gradients", is_first=True)


def generator_step(rank: int) -> Any:
    """A backward for another model passes through this one, which is frozen for that long, and then one of its own."""
    model = Weights(p=1)
    synchronizer = GradientSynchronizer(model)
    synchronizer.broadcast_model()
    other = torch.ones(1, requires_grad=True)
    model.requires_grad_(False)
    backward(((model.get_parameter("p") + 5) * other).sum())
    model.requires_grad_(True)
    backward((model.get_parameter("p") * (rank + 1)).sum())
    synchronizer.sync_gradients()
    return gradients(model)


def discarded_by_all(rank: int) -> Any:
    model, synchronizer = started()
    if rank == 0:
        backward(network_loss(model, 3))
    synchronizer.discard_gradients()
    dropped = gradients(model)
    backward(network_loss(model, rank))
    synchronizer.sync_gradients()
    return {"dropped": set(map(str, dropped.values())) == {"None"}, "gradients": gradients(model)}


def sparse_on_one_rank(rank: int) -> Any:
    model = Weights(p=3)
    synchronizer = GradientSynchronizer(model)
    model.get_parameter("p").grad = torch.ones(3).to_sparse() if rank else torch.ones(3)
    refused = refusal(synchronizer.sync_gradients)
    model.get_parameter("p").grad = torch.ones(3)
    synchronizer.sync_gradients()
    return {"refused": refused, "gradients": gradients(model)}


def channels_last(rank: int) -> Any:
    model = nn.Conv2d(4, 8, 3)
    model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
    synchronizer = GradientSynchronizer(model)
    backward(model(torch.ones(1, 4, 5, 5) * (rank + 1)).sum())
    own = model.weight.grad
    synchronizer.sync_gradients()
    assert own is not None
    assert model.weight.grad is not None
    kept = model.weight.grad.stride() == model.weight.stride()
    return {"kept": kept, "ratio": float((model.weight.grad / own).mean())}


def taken_over(rank: int) -> Any:
    model, former = started()
    synchronizer = GradientSynchronizer(model)
    backward(network_loss(model, rank))
    synchronizer.sync_gradients()
    return {"refused": refusal(former.sync_gradients), "gradients": gradients(model)}


def not_synchronized(rank: int) -> Any:
    """The negative control: after one step with own data, replicas differ; with `sync_gradients` they do not."""
    found = {}
    for name, synchronizes in (("with", True), ("without", False)):
        model, synchronizer = started()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with nullcontext() if synchronizes else synchronizer.no_sync():
            backward(network_loss(model, rank))
            synchronizer.sync_gradients()
        optimizer.step()
        found[name] = [parameter.tolist() for parameter in model.parameters()]
    return found


def wide_sums(rank: int) -> Any:
    """Sums of 512 equal gradients of bfloat16 parameters, in float32."""
    found = {}
    for name, dtype, wire in (("float32", torch.float32, None), ("bf16 wire", torch.float32, torch.bfloat16)):
        model = Weights(p=2).to(torch.bfloat16)
        parameter = model.get_parameter("p")
        synchronizer = GradientSynchronizer(model, accumulate_dtype=dtype, comm_dtype=wire)
        synchronizer.broadcast_model()
        for index in range(512):
            with synchronizer.no_sync() if index < 511 else nullcontext():
                backward((parameter * (rank + 1)).sum())
        during = parameter.grad is None
        synchronizer.sync_gradients()
        averages = [(one is parameter, str(average.dtype), average.tolist()) for one, average in synchronizer.gradients()]
        assert parameter.grad is not None
        norm = synchronizer.clip_grad_norm(1.0)
        clipped = [average.norm().item() for _, average in synchronizer.gradients()]
        own = [str(parameter.grad.dtype), parameter.grad.float().norm().item()]
        found[name] = {
            "during": during,
            "averages": averages,
            "norm": norm,
            "clipped": clipped,
            "own": own,
            "num_bytes": synchronizer.num_bytes,
        }
        model.zero_grad()
        backward(parameter.sum())
        synchronizer.sync_gradients()
        found[name]["next"] = [average.tolist() for _, average in synchronizer.gradients()]
    return found


def refused_models(rank: int) -> Any:
    sharded = nn.Sequential(nn.Linear(2, 2))
    fully_shard(sharded[0], mesh=init_device_mesh("cpu", (2,)))
    lone = nn.ParameterDict({"p": sharded[0].weight})
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    models: dict[str, nn.Module] = {"sharded": sharded, "lone": lone, "wrapped": wrapped}
    return {name: refusal(partial(GradientSynchronizer, model)) for name, model in models.items()}


def bytes_of(rank: int) -> Any:
    """Eight micro-batches: as eight steps, as two, as one."""
    found = {}
    for accumulation in (1, 4, 8):
        model, synchronizer = started()
        for index in range(8):
            with nullcontext() if index % accumulation == accumulation - 1 else synchronizer.no_sync():
                backward(network_loss(model, index))
                synchronizer.sync_gradients()
            if index % accumulation == accumulation - 1:
                model.zero_grad()
        found[str(accumulation)] = [synchronizer.num_bytes, synchronizer.num_rounds]
    return found


CASES: dict[str, Callable[[int], Any]] = {
    case.__name__: case
    for case in (
        sent_by_backward, several_backwards, late_on_one_rank, other_collectives_between, only_under_no_sync, tied_in_checkpoints,
        compiled, failed_and_synchronized, failed_and_discarded, failed_at_first, generator_step,
        discarded_by_all, sparse_on_one_rank, channels_last, taken_over, not_synchronized, wide_sums, bytes_of, refused_models,
    )
}  # fmt: skip


def two_ranks(rank: int, store: Store) -> Any:
    return {name: case(rank) for name, case in CASES.items()}


def elsewhere(rank: int, store: Store) -> Any:
    """Both ranks wait, but for different things."""
    model = Weights(p=3)
    synchronizer, group = GradientSynchronizer(model, timeout_s=4.0), DataParallelGroup.resolve(timeout_s=4.0)
    model.get_parameter("p").grad = torch.ones(3)
    synchronizer.sync_gradients()
    dist.barrier()
    if rank == 1:
        found = refusal(lambda: group.reduce_numbers([1.0], "counts of step 4"))
    else:
        found = refusal(lambda: synchronizer.sync_gradients(step=4))
    dist.barrier(dist.new_group(backend="gloo"))
    return found


def main(path: str) -> None:
    Path(path).write_text(json.dumps({"two_ranks": run_ranks(2, two_ranks), "elsewhere": run_ranks(2, elsewhere)}))


if __name__ == "__main__":
    main(sys.argv[1])
