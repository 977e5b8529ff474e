"""The loader's arguments, checked once when they are given; below, nobody checks user input again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from aioloader.errors import ConfigError
from aioloader.order.lanes import LaneMap
from aioloader.order.mesh import Mesh

__all__ = [
    "check_callable",
    "check_choice",
    "check_cpus",
    "check_deadline",
    "check_int",
    "check_seconds",
    "default_workers",
    "lane_map",
    "not_yet",
    "parse_bytes",
]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def check_int(where: str, value: Any, *, at_least: int, do: str) -> int:
    """Return `value` if it is an int of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(where, expected=f"an int of at least {at_least}", got=repr(value), do=do)
    return value


def check_seconds(where: str, value: Any) -> float | None:
    """Return `value` if it is a positive number of seconds, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ConfigError(
            where, expected="a positive number of seconds, or None for never", got=repr(value), do="leave it out for the default"
        )
    return value


def check_deadline(where: str, value: Any) -> float:
    """Return `value` if it is a positive number of seconds."""
    if check_seconds(where, value) is None:
        raise ConfigError(where, expected="a positive number of seconds", got=repr(value), do="give a large one to wait for long")
    return float(value)


def check_choice(where: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of the choices."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(where, expected=f"one of {listed}", got=repr(value), do="choose one of them")
    return str(value)


def check_callable(where: str, value: Any, *, expected: str, do: str) -> Callable[..., Any]:
    """Return `value` if it can be called."""
    if not callable(value):
        raise ConfigError(where, expected=expected, got=f"{type(value).__name__} {value!r}", do=do)
    function: Callable[..., Any] = value
    return function


def check_cpus(where: str, value: Any) -> tuple[int, ...]:
    """Return CPU numbers as a tuple; None is none."""
    if value is None:
        return ()
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cpus = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (value,)
    if not cpus or any(type(cpu) is not int or cpu not in usable for cpu in cpus):
        raise ConfigError(
            where,
            expected=f"numbers of CPUs that this process may use ({', '.join(map(str, sorted(usable)))})",
            got=repr(value),
            do="leave it out to let the system place the workers",
        )
    return cpus


def not_yet(where: str, *, expected: str, got: object) -> ConfigError:
    """Return the error for an argument whose feature is still to come."""
    return ConfigError(where, expected=f"{expected} (more is planned and not in this version yet)", got=repr(got), do="leave it out")


def parse_bytes(where: str, value: Any) -> int:
    """Return a number of bytes from an int or from text like "2GiB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        number = value.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
        unit = value.strip()[len(number) :].strip().lower()
        try:
            nbytes = int(float(number) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            nbytes = 0
        if nbytes > 0:
            return nbytes
    raise ConfigError(
        where, expected="a positive number of bytes, as an int or like '2GiB'", got=repr(value), do="give a size, e.g. '512MiB'"
    )


def default_workers() -> int:
    """Return the number of CPUs that this process may use, shared between the ranks of this machine under torchrun."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cpus // int(local_ranks)) if local_ranks.isdecimal() and int(local_ranks) > 0 else cpus


def lane_map(lanes: Any, mesh: Mesh) -> LaneMap:
    """Return the lanes of this rank."""
    if lanes is not None:
        check_int("Loader(lanes=)", lanes, at_least=1, do="use dp_size x accumulation")
    return LaneMap(num_lanes=mesh.dp_size if lanes is None else lanes, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
