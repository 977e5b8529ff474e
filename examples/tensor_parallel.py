"""Two data-parallel times two tensor-parallel ranks: one of each tensor-parallel pair reads, and both train on the same micro-batches.

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py

Each pair holds one model, half of the hidden units on either rank; the two models stay equal by averaging gradients.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from aioloader import FixedBatch, GradientSynchronizer, Loader, Mesh, StackCollator

VOCABULARY, WIDTH, HIDDEN, STEPS = 64, 16, 32, 10


class Spread(torch.autograd.Function):
    """Hands a tensor to all ranks of a pair as it is; adds up what comes back from them."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: Any) -> Tensor:
        """Return the tensor."""
        context.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients of all ranks."""
        total = gradients[0].clone()
        dist.all_reduce(total, group=context.group)
        return total, None


class AddUp(torch.autograd.Function):
    """Adds up the tensors of all ranks of a pair; hands each of them the gradient of the sum."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: Any) -> Tensor:
        """Return the sum."""
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the sum."""
        return gradients[0], None


class SplitModel(nn.Module):
    """Predicts the next token; `up` and `down` are this rank's half of the hidden units."""

    def __init__(self, tp_rank: int, tp_size: int, tp_group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)  # the embedding is the same everywhere, the halves are cut from one matrix
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        part = slice(tp_rank * HIDDEN // tp_size, (tp_rank + 1) * HIDDEN // tp_size)
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH)[part] / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH)[part] / HIDDEN**0.5)
        self._group = tp_group

    def forward(self, tokens: Tensor) -> Tensor:
        """Return float32[rows, length, vocabulary]."""
        inputs: Any = Spread.apply(self.embedding(tokens), self._group)  # type: ignore[no-untyped-call]
        outputs: Any = AddUp.apply(torch.relu(inputs @ self.up.T) @ self.down, self._group)  # type: ignore[no-untyped-call]
        logits: Tensor = outputs @ self.embedding.weight.T
        return logits


def count_up(number: int) -> dict[str, Any]:
    """Return tokens that count up from somewhere."""
    return {"tokens": (np.arange(12) + 5 * number) % VOCABULARY}


def main() -> None:
    """Train on this rank."""
    dist.init_process_group("gloo")
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = Mesh.from_device_mesh(device_mesh)
    model = SplitModel(mesh.tp_rank, mesh.tp_size, device_mesh.get_group("tp"))
    synchronizer = GradientSynchronizer(model, mesh, group=device_mesh.get_group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = Loader(
        range(10_000), preprocess=count_up, batch=FixedBatch(8), collate=StackCollator(), mesh=mesh, read="group", workers=1, host="thread"
    )
    losses = []
    with loader:
        for batch in itertools.islice(loader, STEPS):
            logits = model(batch["tokens"][:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            synchronizer.sync_gradients()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (losses, [parameter.sum().item() for parameter in model.parameters()]))
    if dist.get_rank() == 0:
        pairs = found[0][0] == found[1][0] and found[2][0] == found[3][0] and found[0][0] != found[2][0]
        replicas = found[0][1] == found[2][1] and found[1][1] == found[3][1]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"tensor parallel: peers train on the same data: {pairs}; replicas are equal: {replicas}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
