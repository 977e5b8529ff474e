"""What a tree of processes holds of the machine's memory, read from /proc.

Of each process its own memory counts, and memory that it shares with others of the tree once; files that it maps (libraries) do not:
what others on the machine map would move the numbers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.tree import tree_pids

__all__ = ["Footprint", "footprint", "mapped_files", "mapping_at", "memory", "open_files"]

_BLOCK_BYTES = 512  # the unit of st_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """A snapshot of a tree.

    Attributes:
        pss_bytes: Proportional set size without files: a page that n processes map counts 1/n for each, so that the sum counts it once.
        unmapped_bytes: Shared memory that is held by a descriptor and mapped by no process: nobody's set size shows it.
        rss_bytes: Resident set sizes, whatever is shared counted for each process, files included.
        num_open_files: Number of descriptors by process id.
        named_files: Files in /dev/shm that are mapped or open.
    """

    pss_bytes: int
    unmapped_bytes: int
    rss_bytes: int
    num_open_files: dict[int, int]
    named_files: list[str]

    @property
    def held_bytes(self) -> int:
        """Return what would come free if all of the tree ended."""
        return self.pss_bytes + self.unmapped_bytes


def footprint(root: int) -> Footprint:
    """Return what `root` and its descendants hold; takes some 10 ms for each of them."""
    pids = tree_pids(root)
    sizes = [memory(pid) for pid in pids]
    files = {pid: open_files(pid) for pid in pids}
    mapped = {line for pid in pids for line in mapped_files(pid)}
    held = {(inode, nbytes) for of_process in files.values() for path, inode, nbytes in of_process if path.startswith("/memfd:")}
    mapped_inodes = {inode for _, inode in mapped}
    paths = {path for of_process in files.values() for path, _, _ in of_process} | {path for path, _ in mapped}
    return Footprint(
        pss_bytes=sum(size["Pss"] - size["Pss_File"] for size in sizes),
        unmapped_bytes=sum(nbytes for inode, nbytes in held if inode not in mapped_inodes),
        rss_bytes=sum(size["Rss"] for size in sizes),
        num_open_files={pid: len(of_process) for pid, of_process in files.items()},
        named_files=sorted(path for path in paths if path.startswith("/dev/shm/")),
    )


def memory(pid: int) -> dict[str, int]:
    """Return the lines of smaps_rollup in bytes, by name; see proc(5)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}


def open_files(pid: int) -> list[tuple[str, int, int]]:
    """Return (path, inode, bytes that it takes) of what each descriptor of a process stands for."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            status = entry.stat()
            found.append((os.readlink(entry), status.st_ino, status.st_blocks * _BLOCK_BYTES))  # noqa: PTH115 (pipe:[1] is no path)
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


def mapped_files(pid: int) -> set[tuple[str, int]]:
    """Return (path, inode) of the files that a process maps; the path of a file that has no name any more ends in ` (deleted)`."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            found.add((fields[5], int(fields[4])))
    return found


def mapping_at(address: int) -> tuple[str, int]:
    """Return (path, inode) of the file whose mapping by this process holds an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in fields[0].split("-"))
        if first <= address < last and len(fields) == 6:
            return fields[5], int(fields[4])
    raise ValueError(f"no file is mapped at {address:#x}")
