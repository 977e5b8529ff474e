"""What test_dp_group.py looks at on four ranks: groups found from a mesh. Run as `python -m tests.training.mesh_cases results.json`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aioloader.order.mesh import Mesh
from aioloader.training.gradients.synchronizer import GradientSynchronizer
from aioloader.training.groups.dp_group import DataParallelGroup
from tests.training.gradient_cases import Weights, accumulate, gradients, refusal
from tests.training.ranks import Store, run_ranks


def dp_by_tp(rank: int) -> Mesh:
    return Mesh(dp_rank=rank // 2, dp_size=2, tp_rank=rank % 2, tp_size=2)


def members(group: DataParallelGroup) -> Any:
    return [dist.get_process_group_ranks(group.group), group.rank, group.size]


def averaged(rank: int, mesh: Mesh, group: dist.ProcessGroup | None = None) -> Any:
    """Average `rank` over the synchronizer's group, once from `sync_gradients` and once from backward."""
    model = Weights(p=1)
    synchronizer, found = GradientSynchronizer(model, mesh, group=group), []
    for _ in range(2):
        (model.get_parameter("p") * rank).sum().backward()  # type: ignore[no-untyped-call]
        synchronizer.sync_gradients()
        found.append(gradients(model)["p"])
        model.zero_grad()
    return found


def tensor_parallel(rank: int) -> Any:
    mesh = dp_by_tp(rank)
    first, again = DataParallelGroup.resolve(mesh), DataParallelGroup.resolve(mesh)
    total = first.reduce_numbers([rank], "test")
    by_hand, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])  # type: ignore[no-untyped-call]
    return {
        "members": members(first),
        "made_once": first.group is again.group,
        "total": total,
        "averaged": averaged(rank, mesh),
        "by_hand": averaged(rank, mesh, by_hand),
    }


def context_parallel(rank: int) -> Any:
    mesh = Mesh(dp_rank=rank % 2, dp_size=2, cp_rank=rank // 2, cp_size=2)
    return {
        "members": members(DataParallelGroup.resolve(mesh)),
        "across": members(DataParallelGroup.resolve(mesh, across_cp=True)),
        "averaged": averaged(rank, mesh),
        "alone": averaged(rank, Mesh(cp_rank=rank % 2, cp_size=2, tp_rank=rank // 2, tp_size=2)),
    }


def misplaced(rank: int) -> Any:
    meshes = {
        "twice": Mesh(dp_rank=min(rank, 2) // 2, dp_size=2, pp_rank=min(rank, 2) % 2, pp_size=2),
        "uneven": Mesh(dp_rank=rank // 2, dp_size=2 + rank // 3, pp_rank=rank % 2, pp_size=2),
        "few": Mesh(dp_rank=rank, dp_size=5),
    }
    return {name: refusal(partial(DataParallelGroup.resolve, mesh)) for name, mesh in meshes.items()}


def four_ranks(rank: int, store: Store) -> Any:
    model, _ = accumulate(rank, 4)
    return {
        "gradients": gradients(model),
        "tensor_parallel": tensor_parallel(rank),
        "context_parallel": context_parallel(rank),
        "misplaced": misplaced(rank),
        "group_of_others": refusal(lambda: GradientSynchronizer(Weights(p=1), dp_by_tp(rank), group=dist.group.WORLD)),
    }


def absent(rank: int, store: Store) -> Any:
    """Rank 3 makes no group; the others say so."""
    if rank == 3:
        store.wait(["told"])
        return None
    found = refusal(lambda: DataParallelGroup.resolve(dp_by_tp(rank), timeout_s=0.5))
    if store.add("tellers", 1) == 3:
        store.set("told", "yes")
    store.wait(["told"])
    return found


def dead(rank: int, store: Store) -> Any:
    """Rank 3 is gone after the first round; the others name it, and do not wait for it again."""
    model = Weights(p=3)
    synchronizer = GradientSynchronizer(model, timeout_s=4.0)
    found = []
    for _ in range(1 if rank == 3 else 3):
        model.get_parameter("p").grad = torch.ones(3)
        found.append(refusal(synchronizer.sync_gradients))
    return {"found": found, "gradients": gradients(model)}


def main(path: str) -> None:
    results = {"four_ranks": run_ranks(4, four_ranks), "absent": run_ranks(4, absent), "dead": run_ranks(4, dead)}
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
