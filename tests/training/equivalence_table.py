"""However a global batch is cut into ranks and micro-batches, training is the same: gradients and parameters after 20 steps.

    python -m tests.training.equivalence_table

Every cell is compared with one process that takes the same global batch of `8 x dp_size` rows as one micro-batch. The data come
through the real loader and have other token counts in each micro-batch. A difference is the largest one in a tensor over the largest
value in it, and the largest of all tensors is printed. In bfloat16, backward rounds the gradients of each micro-batch to 8 bits, another
rounding for each cut, which sums in float32 average but cannot undo; parameters are rounded alike. So it is the losses that have to agree,
at a learning rate like that of a warm-up: at 25 times the rate the worst of the 20 steps differs by 3.5e-5, and their mean by 4e-6.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aioloader import FixedBatch, Loader, Mesh, PretrainCollator, Shuffle, StepReport, Trainer
from aioloader.training.precision.manager import MixedPrecisionManager
from aioloader.training.precision.transforms import ClipGradNorm, SkipNonFinite
from tests.training.ranks import Store, run_ranks

NUM_STEPS = 20
VOCABULARY, MAX_LEN, WIDTH = 61, 96, 32
ROWS_PER_RANK = 8
CUTS = ((8, 1), (4, 2), (2, 4))
DP_SIZES = (1, 2, 4)
COLUMNS = ("gradients", "parameters", "worst loss", "mean loss")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How a global batch is cut: rows of a micro-batch, micro-batches of a rank in a step, ranks."""

    micro_batch: int
    accumulation: int
    dp_size: int
    is_bf16: bool = False

    @property
    def reference(self) -> Cell:
        return Cell(micro_batch=ROWS_PER_RANK * self.dp_size, accumulation=1, dp_size=1, is_bf16=self.is_bf16)


class CausalModel(nn.Module):
    """One layer of causal attention: what stands right of a token, padding too, does not matter to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(MAX_LEN, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # the gradient of a bias of keys is nothing but rounding
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        query, key, value = self.mix(hidden).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: Tensor = self.output(torch.tanh(hidden + seen.transpose(1, 2).flatten(2)))
        return logits


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    logits = model(batch["input_ids"].long())
    targets = batch["labels"][:, 1:].long()
    total = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, torch.count_nonzero(targets != -100)


def tokenize(number: int) -> dict[str, Any]:
    length = 2 + number * number % (MAX_LEN - 2)
    return {"input_ids": [(number + 3 * place) % VOCABULARY for place in range(length)]}


def train(cell: Cell, rank: int, store: Store) -> Any:
    """Train on this rank and return the losses, and from rank 0 the gradients of the last step and the parameters after it."""
    torch.set_num_threads(1)
    mesh = Mesh(dp_rank=rank, dp_size=cell.dp_size)
    model = CausalModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002 if cell.is_bf16 else 0.05, momentum=0.9)
    options: dict[str, Any] = {"optimizer": optimizer, "max_grad_norm": 1.0}
    if cell.is_bf16:
        manager = MixedPrecisionManager(model, optimizer, transforms=(SkipNonFinite(), ClipGradNorm(1.0)))
        options = {"precision": manager}
    gradients: list[Tensor] = []

    def keep_gradients(optimizer: torch.optim.Optimizer, *args: object) -> None:
        gradients[:] = [one.grad.clone() for group in optimizer.param_groups for one in group["params"]]

    optimizer.register_step_pre_hook(keep_gradients)
    batch, lanes = FixedBatch(cell.micro_batch), cell.accumulation * cell.dp_size
    records, shuffle = range(10_000), Shuffle()
    with Loader(
        records, preprocess=tokenize, batch=batch, collate=PretrainCollator(), mesh=mesh, lanes=lanes, shuffle=shuffle, workers=0
    ) as loader:
        reports: list[StepReport] = []
        Trainer(model, loader, max_steps=NUM_STEPS, mesh=mesh, loss_fn=loss, on_step=reports.append, timeout_s=60, **options).train()
    masters = [one for group in optimizer.param_groups for one in group["params"]]
    found = {"losses": [report.loss for report in reports], "targets": [report.num_targets for report in reports]}
    if rank == 0:
        found |= {"gradients": [one.tolist() for one in gradients], "parameters": [one.tolist() for one in masters]}
    return found


def run(cell: Cell) -> Any:
    """Return what rank 0 found, once all ranks have reported the same losses."""
    results = run_ranks(cell.dp_size, partial(train, cell))
    assert all(result["losses"] == results[0]["losses"] for result in results)
    return results[0]


def difference(found: Any, expected: Any, name: str) -> float:
    """Return the largest relative difference of the tensors called `name`."""
    pairs = [(torch.tensor(one).double(), torch.tensor(other).double()) for one, other in zip(found[name], expected[name], strict=True)]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def compare(cell: Cell, expected: Any) -> dict[str, float]:
    """Run a cell and return its relative differences from `expected`."""
    found = run(cell)
    assert found["targets"] == expected["targets"], "the global batches differ"
    pairs = list(zip(found["losses"], expected["losses"], strict=True))
    return {
        "gradients": difference(found, expected, "gradients"),
        "parameters": difference(found, expected, "parameters"),
        "worst loss": max(abs(one - other) / other for one, other in pairs),
        "mean loss": abs(sum(one - other for one, other in pairs)) / sum(other for _, other in pairs),
    }


def cells(*, is_bf16: bool) -> Iterator[Cell]:
    for dp_size in DP_SIZES:
        for micro_batch, accumulation in CUTS:
            yield Cell(micro_batch=micro_batch, accumulation=accumulation, dp_size=dp_size, is_bf16=is_bf16)


def main() -> int:
    """Print the table; return 1 if a cell misses its target."""
    worst = {"fp32": 0.0, "bf16": 0.0}
    print(f"{NUM_STEPS} steps, relative difference from one process with one micro-batch of the same global batch")
    print(f"{'dtype':6}{'(micro-batch, accumulation)':>28}{'dp_size':>9}" + "".join(f"{name:>12}" for name in COLUMNS))
    for dtype in worst:
        references: dict[Cell, Any] = {}
        for cell in cells(is_bf16=dtype == "bf16"):
            if cell.reference not in references:
                references[cell.reference] = run(cell.reference)
            found = compare(cell, references[cell.reference])
            names = ("gradients", "parameters") if dtype == "fp32" else ("worst loss", "mean loss")
            worst[dtype] = max(worst[dtype], *(found[name] for name in names))
            numbers = "".join(f"{found[name]:12.1e}" for name in COLUMNS)
            print(f"{dtype:6}{f'({cell.micro_batch}, {cell.accumulation})':>28}{cell.dp_size:>9}{numbers}", flush=True)
    print(f"fp32: gradients and parameters differ by {worst['fp32']:.1e} at most, target 1e-6")
    print(f"bf16: the losses differ by {worst['bf16']:.1e} at most, target 1e-5")
    return int(worst["fp32"] > 1e-6 or worst["bf16"] > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
