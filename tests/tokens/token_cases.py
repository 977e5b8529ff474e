"""What the tests of token files share: data with known documents, and writing them in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioloader.tokens.writing import Written, open_writer

FORMATS = ("npy", "pt", "bin", "mds")
SIZE_LIMIT = 500  # several shards of a few rows


def target(directory: Path, format: str) -> Path:
    return directory / "shards" if format == "mds" else directory / f"tokens.{format}"


def write_tokens(
    format: str, path: Path, tokens: npt.ArrayLike, *, dtype: str = "uint16", seq_len: int | None = None, ends: Any = ()
) -> Written:
    writer = open_writer(format, path, dtype=dtype, seq_len=seq_len, size_limit=SIZE_LIMIT)
    try:
        writer.append(np.asarray(tokens), ends)
        return writer.close()
    finally:
        writer.release()


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}
