"""PackedDataset: rows of tokens that were packed offline, memory-mapped, as a map-style data set for torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import SupportsIndex

import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from aioloader.protocols import Json
from aioloader.tokens.reading import TokenRows

__all__ = ["PackedDataset"]


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """The rows of a packed file: `dataset[i]` is `{"input_ids": int64[seq_len]}`, whatever was asked for before and in which process.

    The collator adds labels. The header is checked at once; the values are mapped on first use in each process and pages are
    shared between processes. It pickles as its path. Each row is a copy, safe to change.

    Args:
        path: A .pt or .npy file of shape [rows, seq_len], or a .bin file.
        seq_len: Tokens in a row: needed for a .bin file without metadata; elsewhere it is checked.
        dtype: The type of tokens in a .bin file that has neither an `.idx` nor metadata beside it.

    Raises:
        ConfigError: The file does not hold rows of integers, or of another length.
        SourceError: The file is damaged.
    """

    def __init__(self, path: str | Path, *, seq_len: int | None = None, dtype: npt.DTypeLike | None = None) -> None:
        self._rows = TokenRows(path, seq_len=seq_len, dtype=dtype)

    def __repr__(self) -> str:
        return f"PackedDataset({self._rows!r})"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: SupportsIndex) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(self._rows[index])}

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[dict[str, torch.Tensor]]:
        """Return the rows at these indices, in this order; torch's loaders call it with those of one batch."""
        return [{"input_ids": row} for row in torch.from_numpy(self._rows.take(indices)).unbind()]

    @property
    def seq_len(self) -> int:
        """Return the tokens in a row."""
        return self._rows.seq_len

    @property
    def num_tokens(self) -> int:
        """Return the tokens in all rows."""
        return len(self._rows) * self._rows.seq_len

    def fingerprint(self) -> dict[str, Json]:
        """Return what tells these rows from others; part of a loader's state."""
        return self._rows.fingerprint()

    def close(self) -> None:
        """Let go of the mapping; the next use maps again."""
        self._rows.close()
