"""Files that survive a crash: written, flushed to the disk, and put in their place by one rename."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["flush_directory", "partial_path", "replace_file", "write_file"]


def partial_path(path: Path) -> Path:
    """Return where `replace_file` writes first; a crash may leave it."""
    return path.with_name(f"{path.name}.partial")


def write_file(path: Path, text: str) -> None:
    """Write a file and flush it to the disk; its name is not durable yet."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, text: str) -> None:
    """Put a file in place of what is at `path`: whoever looks finds the old one or the new one, whole."""
    partial = partial_path(path)
    write_file(partial, text)
    partial.replace(path)
    flush_directory(path.parent)


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
