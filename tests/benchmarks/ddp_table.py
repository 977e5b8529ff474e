"""Prints the step time of GradientSynchronizer beside torch's own: `python -m tests.benchmarks.ddp_table`.

One model, two gloo ranks of one thread each. Contestants take turns, in the other order each round, and each step begins at a barrier; a
step is all micro-batches forward and backward, gradients averaged, SGD, `zero_grad`. The time is the median over the rounds of the slower
rank, the CPU seconds are those of both ranks, MB is what a rank hands to all-reduce in a step. "ddp" is DistributedDataParallel with its
defaults, "ddp, views" the same with `gradient_as_bucket_view`; its hook for bfloat16 on the wire refuses gloo.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from aioloader.training.gradients.sync_stats import SyncStats
from aioloader.training.gradients.synchronizer import GradientSynchronizer
from tests.benchmarks.machine import describe_machine, describe_versions
from tests.training import ranks

__all__ = ["main"]

_NUM_WARM_UPS = 2
_WIDTH, _NUM_LAYERS, _FACTOR, _VOCABULARY = 512, 14, 4, 8192


class Block(nn.Module):
    """Attention and a multi-layer perceptron, each after a norm and beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(width, width)])
        self.mlp = nn.Sequential(nn.Linear(width, _FACTOR * width), nn.GELU(), nn.Linear(_FACTOR * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32[rows, tokens, width]."""
        query, key, value = self.attention[0](self.norms[0](hidden)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention[1](mixed.transpose(1, 2).flatten(-2))
        return hidden + self.mlp(self.norms[1](hidden))  # type: ignore[no-any-return]


def transformer(num_layers: int) -> nn.Module:
    """Return a decoder: 52 million parameters in 14 layers."""
    torch.manual_seed(0)
    blocks = [Block(_WIDTH) for _ in range(num_layers)]
    return nn.Sequential(nn.Embedding(_VOCABULARY, _WIDTH), *blocks, nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY))


class Contestant:
    """A model, its optimizer and what averages its gradients."""

    def __init__(
        self,
        model: nn.Module,
        no_sync: Callable[[], AbstractContextManager[Any]],
        sync: Callable[[], object] = int,
        stats: Callable[[], SyncStats] | None = None,
    ) -> None:
        self.model, self.no_sync, self.sync, self.stats = model, no_sync, sync, stats
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(self, tokens: Tensor, accumulation: int) -> None:
        """Take one optimizer step on `accumulation` micro-batches."""
        for index in range(accumulation):
            with self.no_sync() if index < accumulation - 1 else nullcontext():
                logits = self.model(tokens)
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
        self.sync()
        self.optimizer.step()
        self.optimizer.zero_grad()


def ours(num_layers: int, **options: Any) -> Contestant:
    """Return one with GradientSynchronizer."""
    model = transformer(num_layers)
    synchronizer = GradientSynchronizer(model, **options)
    synchronizer.broadcast_model()
    return Contestant(model, synchronizer.no_sync, synchronizer.sync_gradients, synchronizer.stats)


def theirs(num_layers: int, **options: Any) -> Contestant:
    """Return one with DistributedDataParallel."""
    wrapped = DistributedDataParallel(transformer(num_layers), **options)
    return Contestant(wrapped, wrapped.no_sync)


CONTESTANTS: dict[str, Callable[[int], Contestant]] = {
    "ours": ours,
    "ddp": theirs,
    "ddp, views": lambda num_layers: theirs(num_layers, gradient_as_bucket_view=True),
    "ours, bf16": lambda num_layers: ours(num_layers, comm_dtype=torch.bfloat16),
}


class Measured(NamedTuple):
    """Of one contestant on one rank: seconds and CPU seconds of each step, and what its synchronizer counted in these steps."""

    seconds: list[float]
    cpu_seconds: list[float]
    num_bytes: int | None
    overlap: float | None


def measure(names: Sequence[str], num_layers: int, num_tokens: int, accumulation: int, num_rounds: int) -> dict[str, Measured]:
    """Return what each contestant took on this rank."""
    tokens = torch.randint(_VOCABULARY, (1, num_tokens), generator=torch.Generator().manual_seed(dist.get_rank()))
    contestants = {name: CONTESTANTS[name](num_layers) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds + _NUM_WARM_UPS):
        for name, contestant in sorted(contestants.items(), reverse=number % 2 == 1):  # who comes first is a little slower
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            contestant.step(tokens, accumulation)
            seconds[name].append(time.perf_counter() - started)
            cpu_seconds[name].append(time.process_time() - cpu_started)
    found = {}
    for name, contestant in contestants.items():
        stats = contestant.stats() if contestant.stats is not None else None
        num_bytes, overlap = (stats.num_bytes // stats.num_rounds, stats.overlap) if stats is not None else (None, None)
        found[name] = Measured(seconds[name][_NUM_WARM_UPS:], cpu_seconds[name][_NUM_WARM_UPS:], num_bytes, overlap)
    return found


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Print a line for each contestant; the ratio is to DDP with its defaults."""
    print(f"{'contestant':14}{'s/step':>9}{'ratio':>8}{'CPU s':>8}{'MB':>8}{'overlap':>9}")
    times = {
        name: statistics.median(max(pair) for pair in zip(*(Measured(*result[name]).seconds for result in results), strict=True))
        for name in results[0]
    }
    for name, seconds in times.items():
        measured = [Measured(*result[name]) for result in results]
        ratio = f"{seconds / times['ddp']:8.3f}" if "ddp" in times else f"{'':8}"
        cpu = sum(statistics.median(one.cpu_seconds) for one in measured)
        counted = f"{measured[0].num_bytes / 1e6:8.1f}{measured[0].overlap:9.2f}" if measured[0].num_bytes is not None else ""
        print(f"{name:14}{seconds:9.3f}{ratio}{cpu:8.2f}{counted}")


def main() -> None:
    """Print one table for each number of micro-batches in a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=_NUM_LAYERS)
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME")
    arguments = parser.parse_args()
    ranks.LIMIT_S = 3600.0
    machine, versions = describe_machine(), describe_versions()
    print(f"{machine['processor']}, {machine['cores']} cores, load {machine['load_before']}; torch {versions['torch']}")
    num_parameters = sum(parameter.numel() for parameter in transformer(arguments.layers).parameters())
    for accumulation in arguments.accumulation:
        print(f"\n{num_parameters / 1e6:.1f} M parameters, 2 ranks, {accumulation} micro-batches of {arguments.tokens} tokens a step")
        options = (arguments.contestants, arguments.layers, arguments.tokens, accumulation, arguments.rounds)
        print_table(ranks.run_ranks(2, lambda rank, store: measure(*options)))  # noqa: B023


if __name__ == "__main__":
    main()
