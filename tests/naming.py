"""Names of parametrized cases that are the same in every process, so that test processes can share the work."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["stable_repr"]


def stable_repr(value: Any) -> str:
    """Return the representation of a value without addresses of memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
