"""The meaning of an index: any integer, counted from the end where negative."""

from __future__ import annotations

from operator import index as to_int
from typing import SupportsIndex

__all__ = ["checked_index"]


def checked_index(where: object, index: SupportsIndex, length: int) -> int:
    """Return `index` as an int from 0 to `length - 1`; `where` is printed only in the error.

    Raises:
        IndexError: It is out of range.
        TypeError: It is no integer.
    """
    place = to_int(index)
    if place < 0:
        place += length
    if not 0 <= place < length:
        raise IndexError(f"{where}: expected an index from {-length} to {length - 1}, got {to_int(index)}; it has {length} entries.")
    return place
