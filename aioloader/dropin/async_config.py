"""How many workers, and how many records in flight: the rules of the original for what is left out."""

from __future__ import annotations

import warnings
from types import EllipsisType
from typing import Any

from aioloader.options import check_int, default_workers

__all__ = ["resolve_async_config"]

_DEFAULT = 8


def resolve_async_config(buffer_size: Any, num_workers: Any, *, cpu: int | EllipsisType | None = ...) -> tuple[int, int]:
    """Return `(buffer_size, num_workers)` as numbers.

    1. both left out               8, min(8, cpu)
    2. only num_workers            num_workers, num_workers
    3. only buffer_size            buffer_size, min(buffer_size, cpu)
    4. both                        kept; a warning if there are more workers than records for them

    `num_workers=0` means that the work is done in the caller's thread; alone, it makes `buffer_size` 1.

    Args:
        buffer_size: Records in flight at most, or None.
        num_workers: Workers, or None.
        cpu: CPUs to count on; by default those that this rank may use, None if their number is unknown (1 is taken then).

    Raises:
        ConfigError: A number is no int, `buffer_size` is below 1 or `num_workers` is negative.
    """
    if buffer_size is not None:
        check_int("buffer_size", buffer_size, at_least=1, do="allow at least one record in flight, or leave it out")
    if num_workers is not None:
        check_int("num_workers", num_workers, at_least=0, do="use 0 to work in the caller's thread, or leave it out")
        if buffer_size is None:
            return max(1, num_workers), num_workers
        if buffer_size < num_workers:
            warnings.warn(
                f"buffer_size={buffer_size}, num_workers={num_workers}: expected a record in flight for each worker, got fewer; "
                f"{num_workers - buffer_size} workers have nothing to do. Use buffer_size >= num_workers.",
                UserWarning,
                stacklevel=3,
            )
        return buffer_size, num_workers
    num_cpus = max(1, (default_workers() if isinstance(cpu, EllipsisType) else cpu) or 1)
    return (buffer_size or _DEFAULT), min(buffer_size or _DEFAULT, num_cpus)
