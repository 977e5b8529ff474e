"""Where this rank stands: its coordinates on the axes of the device mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from aioloader.errors import ConfigError

__all__ = ["Mesh"]

_AXES = ("dp", "tp", "pp", "cp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The coordinates of one rank: data, tensor, pipeline, context and expert parallel.

    Data are dealt out by `dp_rank` and `dp_size` alone; ranks that differ on another axis only get the same micro-batches.
    A mesh is plain numbers: it needs no process group, so any rank can be played on one machine.

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
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Mesh:
        """Return the mesh of a torchrun job, all of it data parallel, or a single rank outside of one.

        Reads `RANK` and `WORLD_SIZE`; nothing else, and no process group is needed.

        Raises:
            ConfigError: Only one of the two is set, one is not an integer, or the rank is not inside the world.
        """
        present = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
        if not present:
            return cls()
        if len(present) == 1:
            raise ConfigError(
                "Mesh.from_env()",
                expected="both RANK and WORLD_SIZE in the environment, or neither",
                got=f"only {present[0]}={environ[present[0]]!r}",
                do="start the script with torchrun, or give Mesh(dp_rank=, dp_size=) by hand",
            )
        return cls(dp_rank=_integer(environ, "RANK"), dp_size=_integer(environ, "WORLD_SIZE"))

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


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(
            "Mesh.from_env()", expected=f"an integer in {name}", got=repr(environ[name]), do="start the script with torchrun"
        ) from None
