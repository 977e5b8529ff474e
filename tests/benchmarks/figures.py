"""How a number is written, in tables and in sentences."""

from __future__ import annotations

__all__ = ["figure"]


def figure(value: float | None) -> str:
    """Return three digits of a number that matter, all digits before the point, and a dash for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
