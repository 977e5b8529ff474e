"""The layout of a format that is a header, of known length, and then the values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from aioloader.protocols import Json
from aioloader.tokens.append_file import AppendFile
from aioloader.tokens.dtypes import Tokens

__all__ = ["FlatLayout"]


class FlatLayout:
    """One file.

    Args:
        path: The file.
        dtype: The type of the tokens.
        num_tokens: To go on after so many; None to start afresh.
        header: The header for so many tokens, equally long for any number of them; by default there is none.
    """

    def __init__(
        self, path: Path, dtype: np.dtype[Any], num_tokens: int | None, header: Callable[[int], bytes] = lambda num_tokens: b""
    ) -> None:
        self._header = header
        self._file = AppendFile(path, header(0), None if num_tokens is None else num_tokens * dtype.itemsize)

    def write(self, tokens: Tokens) -> None:
        """Append tokens of the flat stream."""
        self._file.write(tokens.data.cast("B"))

    def sync(self) -> dict[str, int]:
        """Flush to the disk; see `aioloader.tokens.rows.Layout`."""
        return {self._file.path.name: self._file.sync()}

    def state(self) -> Json:
        """Return nothing: the number of tokens says it all."""
        return None

    def finish(self, num_tokens: int) -> list[Path]:
        """Write the final header."""
        self._file.replace_header(self._header(num_tokens))
        self._file.sync()
        return [self._file.path]

    def release(self) -> None:
        """Close the descriptor."""
        self._file.release()
