"""Where the tokens of a file lie: what a header says, checked against the size of the file before anything is mapped."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from aioloader.errors import ConfigError, SourceError
from aioloader.tokens.dtypes import Tokens

__all__ = ["Extent", "check_extent", "file_size", "file_version", "map_array"]


@dataclass(frozen=True, slots=True)
class Extent:
    """An array in C order inside a file: it starts at `offset` bytes and has this type and shape."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize


def file_size(path: Path) -> int:
    """Return the size of a file.

    Raises:
        ConfigError: There is no such file.
    """
    if not path.is_file():
        got = "a directory" if path.is_dir() else "no such file"
        raise ConfigError(str(path), expected="a token file", got=got, do="check the path")
    return path.stat().st_size


def file_version(path: Path) -> tuple[int, int]:
    """Return what changes when a file is replaced or written again: its size in bytes and the time of its last change in ns."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def check_extent(path: Path, extent: Extent) -> None:
    """Check that the file is as long as its header says.

    Raises:
        SourceError: It is shorter, or the header says something impossible.
    """
    if min(extent.shape, default=0) < 0:
        raise SourceError(f"{path}: expected a shape, got {list(extent.shape)}; its header is damaged: copy it again, or write it again.")
    size, needed = file_size(path), extent.offset + extent.num_bytes
    if size < needed:
        what = f"{extent.dtype.name}{list(extent.shape)}"
        raise SourceError(f"{path}: expected {needed} bytes for {what}, got {size}; it was cut short: copy it again, or write it again.")


def map_array(path: Path, extent: Extent) -> Tokens:
    """Return the array, mapped read-only: nothing is read until it is used, and processes share what was.

    Raises:
        SourceError: The file is shorter than its header says.
    """
    check_extent(path, extent)
    if not extent.num_bytes:
        return np.empty(extent.shape, extent.dtype)  # an empty range cannot be mapped
    mapped = np.memmap(path, extent.dtype, mode="r", offset=extent.offset, shape=extent.shape)
    return mapped.view(np.ndarray)  # indexing the subclass costs microseconds
