"""CPU time and memory of a process and all its descendants, from /proc; a walk takes about a millisecond."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["tree_cpu_s", "tree_pids", "tree_pss_bytes"]

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
    ticks = 0
    for pid in tree_pids(root):
        fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        ticks += sum(map(int, fields[_FIELDS_BEFORE_UTIME : _FIELDS_BEFORE_UTIME + 4]))
    return ticks * _TICK_S


def tree_pss_bytes(root: int) -> int:
    """Return the memory of the tree in bytes, pages that several processes share counted once."""
    total_kib = 0
    for pid in tree_pids(root):
        for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
            if line.startswith("Pss:"):
                total_kib += int(line.split()[1])
    return total_kib * 1024


def _read(path: Path) -> str:
    """Return a file of a process, empty if the process is gone."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
