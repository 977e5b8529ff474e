"""Text for terminals: columns, and lists of numbers that are cut in the middle."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["elided", "table"]

_MOST_NUMBERS = 8


def elided(numbers: Sequence[int]) -> str:
    """Return numbers as text; of many, the first and the last ones and how many there are."""
    if len(numbers) <= _MOST_NUMBERS:
        return " ".join(map(str, numbers))
    half = _MOST_NUMBERS // 2
    return f"{elided(numbers[:half])} ... {elided(numbers[-half:])} ({len(numbers)})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the columns one under another."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
