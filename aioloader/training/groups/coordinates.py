"""Which ranks form a data-parallel group: found from the coordinates that all ranks tell each other once.

rank  0 1 2 3            dp_size 2 x tp_size 2, tp innermost
dp    0 0 1 1
tp    0 1 0 1            groups: ranks 0 and 2 (tp 0), ranks 1 and 3 (tp 1)
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from aioloader.errors import ConfigError, SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.protocols import Json

__all__ = ["data_parallel_ranks", "exchange", "exchange_members", "exchange_meshes"]

_numbers = itertools.count()
_AXES = ("dp", "cp", "tp", "pp", "ep")


def data_parallel_ranks(meshes: Sequence[Mesh], *, across_cp: bool) -> list[list[int]]:
    """Return the ranks of each data-parallel group, those of a group in rising `dp_rank` (then `cp_rank`).

    A group is what differs in `dp_rank` only, or with `across_cp` in `dp_rank` and `cp_rank`. The groups come in rising order of
    their other coordinates: the same list on every rank.

    Args:
        meshes: Of each rank of the job.
        across_cp: Whether ranks that hold parts of the same sequence belong to one group.

    Raises:
        ConfigError: Ranks see axes of different length, two stand at the same place, or a place is empty.
    """
    _check_sizes(meshes)
    inner = ("dp", "cp") if across_cp else ("dp",)
    outer = [axis for axis in _AXES if axis not in inner]
    groups: dict[tuple[int, ...], dict[tuple[int, ...], int]] = defaultdict(dict)
    for rank, mesh in enumerate(meshes):
        group = groups[tuple(_rank(mesh, axis) for axis in outer)]
        place = tuple(_rank(mesh, axis) for axis in inner)
        if place in group:
            raise _misplaced(f"rank {group[place]} and rank {rank} both at {mesh.describe()}", "give each rank coordinates of its own")
        group[place] = rank
    size = 1
    for axis in inner:
        size *= _size(meshes[0], axis)
    for key, group in sorted(groups.items()):
        if len(group) != size:
            where = ", ".join(f"{axis} {rank}" for axis, rank in zip(outer, key, strict=True))
            got = f"{len(group)} of {size} for {where}, ranks {sorted(group.values())}"
            raise _misplaced(got, "start as many processes as the product of the axes")
    return [[group[place] for place in sorted(group)] for _, group in sorted(groups.items())]


def exchange_meshes(mesh: Mesh, timeout_s: float) -> list[Mesh]:
    """Return the mesh of every rank of the job; collective, see `exchange`."""
    own = {f"{axis}_{part}": getattr(mesh, f"{axis}_{part}") for axis in _AXES for part in ("rank", "size")}
    return [Mesh(**other) for other in exchange("coordinates", own, timeout_s)]


def exchange_members(ranks: Sequence[int], timeout_s: float) -> list[list[int]]:
    """Return the members of each rank's group, each group once, in the same order on every rank; collective, see `exchange`.

    Raises:
        ConfigError: Two ranks of a group do not see the same members.
    """
    lists = exchange("members of the data-parallel groups", list(ranks), timeout_s)
    for rank, members in enumerate(lists):
        for other in members:
            if lists[other] != members:
                got = f"{members} on rank {rank} and {lists[other]} on rank {other}"
                raise ConfigError("group", expected="the same members on all of its ranks", got=got, do="give every rank its own group")
    return sorted({tuple(members): members for members in lists}.values())


def exchange(topic: str, value: Json, timeout_s: float) -> list[Json]:
    """Return what each rank of the job gave, by rank. All ranks have to call it, in the same order if there are several calls.

    Through the store, not by a collective: it needs no device, and knows who has not come.

    Raises:
        SynchronizationError: A rank did not come in time; `missing` names it.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    name, size, rank = f"aioloader/{topic}/{next(_numbers)}", dist.get_world_size(), dist.get_rank()
    keys, all_here = [f"{name}/{other}" for other in range(size)], f"{name}/all"
    store.set(keys[rank], json.dumps(value))
    if store.add(f"{name}/count", 1) == size:
        store.set(all_here, "yes")
    ends_s, pause_s = time.monotonic() + timeout_s, 0.001
    while not store.check([all_here]):  # one question a time, however many ranks: all of them ask one store
        if time.monotonic() > ends_s:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            message = (
                f"on rank {rank}: expected the {topic} of all {size} ranks, got none from rank {', '.join(map(str, missing))} "
                f"within {timeout_s:g} s; look there for why it has not come"
            )
            raise SynchronizationError("exchange", message, missing=missing)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return [json.loads(text) for text in store.multi_get(keys)]


def _check_sizes(meshes: Sequence[Mesh]) -> None:
    for axis in _AXES:
        sizes = {_size(mesh, axis): rank for rank, mesh in reversed(list(enumerate(meshes)))}
        if len(sizes) > 1:
            got = " and ".join(f"{axis}_size {size} on rank {rank}" for size, rank in sorted(sizes.items()))
            raise _misplaced(got, f"give every rank the same {axis}_size")


def _rank(mesh: Mesh, axis: str) -> int:
    rank: int = getattr(mesh, f"{axis}_rank")
    return rank


def _size(mesh: Mesh, axis: str) -> int:
    size: int = getattr(mesh, f"{axis}_size")
    return size


def _misplaced(got: str, do: str) -> ConfigError:
    return ConfigError("mesh", expected="each place on the axes taken by exactly one rank", got=got, do=do)
