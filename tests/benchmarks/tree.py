"""CPU time and memory of a process and all its descendants, from /proc; a walk takes about a millisecond."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cpu_by_process_s", "tree_cpu_s", "tree_pids", "tree_pss_bytes"]

_ENGINE = "aioloader-engine"[:15]  # as much of a name as the kernel keeps
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_FIELDS_BEFORE_UTIME = 11  # of /proc/PID/stat after the command: state, ppid, ...


def tree_pids(root: int) -> list[int]:
    """Return the process ids of `root` and its descendants that exist now, also those that ended and are not yet waited for."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            waiting.extend(int(child) for child in _read(listing).split())
    return found


def tree_cpu_s(root: int) -> float:
    """Return user and system time of the tree in seconds, with that of descendants that ended and were waited for."""
    return sum(own_s + ended_s for _, own_s, ended_s in map(_cpu_s, tree_pids(root)))


def cpu_by_process_s(root: int) -> dict[str, float]:
    """Return what `tree_cpu_s` does, in parts: of `root` alone as "trainer", of aioloader's engine, and of all others as "workers".

    "engine" is left out where no process is one. All threads of a process count for it.
    """
    parts = {"trainer": 0.0, "workers": 0.0}
    for pid in tree_pids(root):
        command, own_s, ended_s = _cpu_s(pid)
        whose = "trainer" if pid == root else "engine" if command == _ENGINE else "workers"
        parts[whose] = parts.get(whose, 0.0) + own_s
        parts["workers"] += ended_s
    return parts


def tree_pss_bytes(root: int) -> int:
    """Return the memory of the tree in bytes, pages that several processes share counted once."""
    total_kib = 0
    for pid in tree_pids(root):
        for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
            if line.startswith("Pss:"):
                total_kib += int(line.split()[1])
    return total_kib * 1024


def _cpu_s(pid: int) -> tuple[str, float, float]:
    """Return the name of a process, its own seconds, and those of its children that ended and were waited for."""
    before, _, after = _read(Path(f"/proc/{pid}/stat")).rpartition(")")
    ticks = [int(field) for field in after.split()[_FIELDS_BEFORE_UTIME : _FIELDS_BEFORE_UTIME + 4]]
    return before.partition("(")[2], sum(ticks[:2]) * _TICK_S, sum(ticks[2:]) * _TICK_S


def _read(path: Path) -> str:
    """Return a file of a process, empty if the process is gone."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
