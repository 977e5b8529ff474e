"""Layouts: where each rank of a job stands on the axes of its device mesh. Plain arithmetic.

pp=2, dp=2, tp=2     outermost first, as in a DeviceMesh: the last axis changes fastest

rank   0 1 2 3 4 5 6 7
pp     0 0 0 0 1 1 1 1
dp     0 0 1 1 0 0 1 1
tp     0 1 0 1 0 1 0 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from aioloader.errors import ConfigError

__all__ = ["AXES", "DATA_AXES", "Layout", "Place"]

DATA_AXES: Final = ("dp", "dp_replicate", "dp_shard", "ep")
"""The axes whose ranks get different samples, in the order in which their coordinates make the data-parallel rank.

Expert-parallel peers train on different samples: in Megatron-LM and torchtitan, expert groups are cut out of the data-parallel ranks.
"""

AXES: Final = ("pp", *DATA_AXES, "cp", "tp")
_LISTED: Final = "pp, dp (or dp_replicate and dp_shard), ep, cp and tp"


class Place(NamedTuple):
    """A coordinate on one axis, `0 <= rank < size`."""

    axis: str
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes of a job's device mesh with their sizes, outermost first. Make one with `Layout.of`."""

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int] | Iterable[tuple[str, int]], world_size: int | None = None, *, where: str = "Layout.of") -> Layout:
        """Return the layout of these axes, checked.

        Args:
            sizes: Axes and their sizes, outermost first, one of them data parallel. One size may be -1: what `world_size` leaves.
            world_size: The number of ranks, which the product of the sizes has to be.
            where: What messages call the argument.

        Raises:
            ConfigError: An axis is unknown or there twice, none is data parallel, a size is no positive integer, or the product is
                not `world_size`.
        """
        axes = list(sizes.items() if isinstance(sizes, Mapping) else sizes)
        _check_names([axis for axis, _ in axes], where)
        _check_sizes(axes, where)
        if world_size is not None and not _is_positive(world_size):
            raise ConfigError(where, expected="a world size of 1 or more", got=repr(world_size), do="give the number of ranks of the job")
        axes = _inferred(axes, world_size, where)
        product = math.prod(size for _, size in axes)
        if world_size is not None and product != world_size:
            raise ConfigError(
                where,
                expected=f"sizes whose product is the world size, {world_size}",
                got=f"{_text(axes)}, which is {product}",
                do=_remedy(axes, world_size),
            )
        return cls(tuple(axes))

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(size for _, size in self.sizes)

    def places(self, rank: int, *, where: str = "Layout.places(rank)") -> tuple[Place, ...]:
        """Return the coordinates of a global rank, outermost first.

        Raises:
            ConfigError: It is not a rank of this layout.
        """
        if not _is_integer(rank) or not 0 <= rank < self.world_size:
            raise ConfigError(
                where,
                expected=f"a rank from 0 to {self.world_size - 1} ({self.describe()})",
                got=repr(rank),
                do="give the global rank, as torchrun has it in RANK",
            )
        places = []
        for axis, size in reversed(self.sizes):
            rank, coordinate = divmod(rank, size)
            places.append(Place(axis, coordinate, size))
        return tuple(reversed(places))

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """Return the global rank at these coordinates, one for each axis: the inverse of `places`."""
        rank = 0
        for axis, size in self.sizes:
            rank = rank * size + coordinates[axis]
        return rank

    def describe(self) -> str:
        """Return the axes for people: `"pp=2, dp=4, tp=2"`."""
        return _text(self.sizes)


def _check_names(axes: Sequence[Any], where: str) -> None:
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise ConfigError(where, expected=f"axes out of {_LISTED}", got=repr(unknown[0]), do="rename it, or leave it out")
    doubled = next((axis for axis in axes if axes.count(axis) > 1), None)
    if doubled is not None:
        raise ConfigError(where, expected="each axis once", got=f"{doubled} twice", do="give one size for it")
    parts = [axis for axis in axes if axis in ("dp_replicate", "dp_shard")]
    if "dp" in axes and parts:
        raise ConfigError(
            where,
            expected="either dp or dp_replicate and dp_shard",
            got=f"dp and {' and '.join(parts)}",
            do="leave dp out, it is their product",
        )
    if "dp" not in axes and not parts:
        raise ConfigError(
            where,
            expected="a data-parallel axis: dp, or dp_replicate and dp_shard",
            got=", ".join(axes) or "no axis",
            do="give dp=-1 for all ranks that are left, or dp=1 if all ranks shall get the same data",
        )


def _check_sizes(axes: Sequence[tuple[str, Any]], where: str) -> None:
    for axis, size in axes:
        if not _is_positive(size) and not (_is_integer(size) and size == -1):
            raise ConfigError(
                where,
                expected=f"a size of 1 or more for {axis}, or -1 for what is left",
                got=repr(size),
                do=f"give the number of {axis} ranks",
            )
    open_axes = [axis for axis, size in axes if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(where, expected="at most one size of -1", got=f"-1 for {' and '.join(open_axes)}", do="give all sizes but one")


def _inferred(axes: list[tuple[str, int]], world_size: int | None, where: str) -> list[tuple[str, int]]:
    """Return the axes with what `world_size` leaves for the one whose size is -1."""
    if all(size != -1 for _, size in axes):
        return axes
    given = math.prod(size for _, size in axes if size != -1)
    if world_size is None:
        raise ConfigError(where, expected="all sizes, where no world size is known", got=_text(axes), do="give world_size, or the size")
    if world_size % given:
        raise ConfigError(
            where,
            expected=f"sizes whose product divides the world size, {world_size}",
            got=f"{_text(axes)}, of which {given} are given",
            do="start a multiple of that many ranks, or correct the sizes",
        )
    return [(axis, world_size // given if size == -1 else size) for axis, size in axes]


def _remedy(axes: Sequence[tuple[str, int]], world_size: int) -> str:
    if any(axis == "ep" for axis, _ in axes) and math.prod(size for axis, size in axes if axis != "ep") == world_size:
        return "leave ep out where its ranks are among those of dp already, as in Megatron-LM, or give dp without them"
    return "correct the sizes, or give -1 for one of them"


def _text(axes: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in axes)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_integer(value) and value >= 1
