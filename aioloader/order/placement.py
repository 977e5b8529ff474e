"""Placements: which lanes each rank of a job serves, and which ranks get the same micro-batches. Nothing has to run.

pp=2, dp=2, tp=2, 4 lanes

dp_rank   lanes   ranks that get their micro-batches
0         0 2     0 1 4 5
1         1 3     2 3 6 7
"""

from __future__ import annotations

from dataclasses import dataclass

from aioloader.errors import ConfigError
from aioloader.order.lanes import LaneMap
from aioloader.order.layout import Layout
from aioloader.order.mesh import Mesh

__all__ = ["Placement"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The lanes and peers of every rank of a layout. Make one with `Placement.of`."""

    layout: Layout
    num_lanes: int

    @classmethod
    def of(cls, layout: Layout, *, lanes: int | None = None, accumulation: int | None = None) -> Placement:
        """Return the placement of `lanes`, or of `accumulation` lanes for each data-parallel rank; by default one for each.

        Raises:
            ConfigError: Both are given, or `lanes` is no positive multiple of the data-parallel size.
        """
        if lanes is not None and accumulation is not None:
            got = f"{lanes} lanes and an accumulation of {accumulation}"
            raise ConfigError("Placement.of(lanes=)", expected="lanes or accumulation", got=got, do="leave one out")
        dp_size = Mesh.at(layout.places(0)).dp_size
        if lanes is None:
            lanes = dp_size * (1 if accumulation is None else accumulation)
        return cls(layout, LaneMap(num_lanes=lanes, dp_size=dp_size).num_lanes)

    @property
    def dp_size(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.mesh(0).dp_size

    @property
    def accumulation(self) -> int:
        """Return the micro-batches of one rank in an optimizer step."""
        return self.num_lanes // self.dp_size

    @property
    def resumable_dp_sizes(self) -> tuple[int, ...]:
        """Return the data-parallel sizes on which the run may go on with the same global batches: the divisors of its lanes."""
        return tuple(size for size in range(1, self.num_lanes + 1) if self.num_lanes % size == 0)

    def mesh(self, rank: int) -> Mesh:
        """Return the coordinates of a global rank."""
        return Mesh.at(self.layout.places(rank))

    def lanes(self, dp_rank: int) -> range:
        """Return the lanes that a data-parallel rank serves, rising."""
        return LaneMap(num_lanes=self.num_lanes, dp_rank=dp_rank, dp_size=self.dp_size).served

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return for each data-parallel rank the global ranks that get its micro-batches, rising: together, each rank once.

        The first of a group is its reader where one reads for all (`Mesh.peer_rank` 0).
        """
        groups: list[list[int]] = [[] for _ in range(self.dp_size)]
        for rank in range(self.layout.world_size):
            groups[self.mesh(rank).dp_rank].append(rank)
        return tuple(map(tuple, groups))
