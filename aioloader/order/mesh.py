"""Where this rank stands: its coordinates on the axes of the device mesh."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from aioloader.errors import ConfigError
from aioloader.order.frameworks import device_mesh_places, megatron_coordinates
from aioloader.order.layout import DATA_AXES, Layout, Place

__all__ = ["Mesh"]

_AXES = ("dp", "tp", "pp", "cp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The coordinates of one rank: data, tensor, pipeline, context and expert parallel.

    Data are dealt out by `dp_rank` and `dp_size` alone; ranks that have the same `dp_rank` are peers and get the same micro-batches.
    Expert-parallel peers train on different samples, so they count in `dp_rank` and `dp_size` already, and `ep_rank` is told for
    information. A mesh is plain numbers: it needs no process group, so any rank can be played on one machine.

    Attributes:
        dp_rank: Place on the data-parallel axis, `0 <= dp_rank < dp_size`; the other axes alike.
        dp_size: Length of the data-parallel axis, 1 or more; the other axes alike.

    Raises:
        ConfigError: A size is not an integer of 1 or more, or a rank is not inside its axis.
    """

    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for axis in _AXES:
            _check_axis(axis, getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size"))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, *, sizes: Mapping[str, int] | None = None) -> Mesh:
        """Return the mesh of a torchrun job, all of it data parallel unless `sizes` says more, or a single rank outside of one.

        Reads `RANK` and `WORLD_SIZE`; nothing else, and no process group is needed.

        Args:
            environ: The environment.
            sizes: See `from_layout`; one of them may be -1, e.g. `{"dp": -1, "tp": 2}`.

        Raises:
            ConfigError: Only one of the two is set, one is not an integer, the rank is not inside the world, or `sizes` do not fit.
        """
        present = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
        if len(present) == 1:
            raise ConfigError(
                "Mesh.from_env()",
                expected="both RANK and WORLD_SIZE in the environment, or neither",
                got=f"only {present[0]}={environ[present[0]]!r}",
                do="start the script with torchrun, or give Mesh(dp_rank=, dp_size=) by hand",
            )
        rank, world_size = (_integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")) if present else (0, 1)
        if sizes is None:
            return cls(dp_rank=rank, dp_size=world_size)
        layout = Layout.of(sizes, world_size, where="Mesh.from_env(sizes=)")
        return cls.at(layout.places(rank, where="Mesh.from_env()"))

    @classmethod
    def from_layout(cls, rank: int, sizes: Mapping[str, int], world_size: int | None = None) -> Mesh:
        """Return the mesh of a global rank in a job that is laid out on these axes.

        Args:
            rank: The global rank.
            sizes: Axis to size, outermost first: the last axis changes fastest from rank to rank. Axes are pp, dp (or
                dp_replicate and dp_shard), ep, cp and tp; all but dp may be left out where their size is 1, and one size may be -1
                where `world_size` is given. An ep axis counts as data parallel: leave it out where expert parallelism reuses the
                ranks of dp.
            world_size: The number of ranks, to be checked.

        Raises:
            ConfigError: An axis is unknown, there twice or missing, the product is not `world_size`, or the rank is outside.
        """
        layout = Layout.of(sizes, world_size, where="Mesh.from_layout(sizes=)")
        return cls.at(layout.places(rank, where="Mesh.from_layout(rank=)"))

    @classmethod
    def from_device_mesh(cls, device_mesh: Any, *, names: Mapping[str, str] | None = None) -> Mesh:
        """Return the mesh of this rank in a torch `DeviceMesh` with named axes, in any order.

        Args:
            device_mesh: The whole mesh; its axes are named as those of `from_layout`. `dp_rank` counts dp_replicate-major.
            names: What other names mean, e.g. `{"data": "dp", "fsdp": "dp"}`; axes of one meaning are multiplied, outermost first.

        Raises:
            ConfigError: An axis has no name or an unknown one, none is data parallel, or this rank is not in the mesh.
        """
        return cls.at(device_mesh_places(device_mesh, {} if names is None else names))

    @classmethod
    def from_megatron(cls, parallel_state: Any) -> Mesh:
        """Return the mesh of this rank according to Megatron: pass the module `megatron.core.parallel_state`.

        Raises:
            ConfigError: It has not the functions of Megatron's, or the groups were not made yet.
        """
        return cls(**megatron_coordinates(parallel_state))

    @classmethod
    def at(cls, places: Iterable[Place]) -> Mesh:
        """Return the mesh with these coordinates; axes that make one are multiplied, outermost first."""
        at = list(places)
        numbers: dict[str, int] = {}
        for axis in _AXES:
            parts = DATA_AXES if axis == "dp" else (axis,)
            along = sorted((place for place in at if place.axis in parts), key=lambda place: parts.index(place.axis))
            numbers[f"{axis}_rank"], numbers[f"{axis}_size"] = _joined(along)
        return cls(**numbers)

    @property
    def num_peers(self) -> int:
        """Return how many ranks, this one with them, get the same micro-batches."""
        return self.pp_size * self.cp_size * self.tp_size

    @property
    def peer_rank(self) -> int:
        """Return the place among them, `0 <= peer_rank < num_peers`; 0 reads where one reads for all."""
        return (self.pp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank

    def describe(self) -> str:
        """Return the axes that have more than one rank, for logs and messages: `"dp 1/4, tp 0/2"`."""
        axes = [(axis, getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")) for axis in _AXES]
        return ", ".join(f"{axis} {rank}/{size}" for axis, rank, size in axes if size > 1) or "a single rank"


def _check_axis(axis: str, rank: object, size: object) -> None:
    if not _is_integer(size) or size < 1:
        raise ConfigError(f"Mesh({axis}_size=)", expected="an integer, 1 or more", got=repr(size), do=f"give the number of {axis} ranks")
    if not _is_integer(rank) or not 0 <= rank < size:
        raise ConfigError(
            f"Mesh({axis}_rank=)",
            expected=f"an integer from 0 to {size - 1} ({axis}_size is {size})",
            got=repr(rank),
            do=f"number the {axis} ranks from 0",
        )


def _joined(places: Iterable[Place]) -> tuple[int, int]:
    """Return (rank, size) on the product of axes, outermost first."""
    rank, size = 0, 1
    for place in places:
        rank, size = rank * place.size + place.rank, size * place.size
    return rank, size


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(
            "Mesh.from_env()", expected=f"an integer in {name}", got=repr(environ[name]), do="start the script with torchrun"
        ) from None
