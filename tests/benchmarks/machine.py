"""Where a run took place: hardware and versions, as far as they decide the numbers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

__all__ = ["describe_machine", "describe_versions"]

_DISTRIBUTIONS = ("aioloader", "numpy", "torch", "torchdata", "grain", "spdl", "datasets", "tokenizers", "pillow", "uvloop", "anyio")


def describe_machine() -> dict[str, str | int | float]:
    """Return the processor, the cores this process may use, the memory, the system, and how busy it was."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def describe_versions() -> dict[str, str]:
    """Return the version of Python and of each library that is installed."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _field(path: str, name: str) -> str:
    """Return the value of the first line `name: value`, or nothing."""
    lines = Path(path).read_text().splitlines()
    return next((value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), "")
