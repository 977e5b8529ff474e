"""MMapTokens: windows of a flat stream of tokens, memory-mapped, as a map-style data set for torch."""

from __future__ import annotations

from pathlib import Path
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from aioloader.errors import ConfigError
from aioloader.protocols import Json
from aioloader.tokens.indexing import checked_index
from aioloader.tokens.reading import TokenFile

__all__ = ["MMapTokens"]


class MMapTokens(Dataset[torch.Tensor | dict[str, torch.Tensor]]):
    """Consecutive windows of `seq_len` tokens: `dataset[i]` is int64[seq_len], tokens `i * seq_len` to `(i + 1) * seq_len - 1`.

    With `return_labels` it is `{"input_ids": those, "labels": the same window one token on}`: labels that are shifted already, for
    models that do not shift. Its last label is why there are `(num_tokens - 1) // seq_len` windows, with labels or without.

    The header is checked at once; the values are mapped on first use in each process and pages are shared between processes. It
    pickles as its path. Each window is a copy, safe to change.

    Args:
        path: A .npy or .pt file of shape [tokens], or a .bin file (raw, or Megatron's with its `.idx`).
        seq_len: Tokens in a window.
        return_labels: Whether to add labels.
        dtype: The type of tokens in a .bin file that has neither an `.idx` nor metadata beside it.

    Raises:
        ConfigError: The file does not hold a flat stream of integers, or an argument is wrong.
        SourceError: The file is damaged.
    """

    def __init__(self, path: str | Path, seq_len: int, *, return_labels: bool = False, dtype: npt.DTypeLike | None = None) -> None:
        if type(seq_len) is not int or seq_len < 1:
            raise ConfigError("MMapTokens(seq_len)", expected="an int of at least 1", got=repr(seq_len), do="give the tokens in a window")
        self._file = TokenFile(path, dtype=dtype)
        if len(self._file.shape) != 1:
            got = f"shape {list(self._file.shape)}"
            raise ConfigError(str(path), expected="tokens of shape [tokens]", got=got, do="use PackedDataset(path) for rows")
        self.seq_len = seq_len
        self.return_labels = return_labels

    def __repr__(self) -> str:
        return f"MMapTokens({self._file!r}, {self.seq_len})"

    def __len__(self) -> int:
        return max(self.num_tokens - 1, 0) // self.seq_len

    def __getitem__(self, index: SupportsIndex) -> torch.Tensor | dict[str, torch.Tensor]:
        start = checked_index(self, index, len(self)) * self.seq_len
        tokens = self._window(start)
        return {"input_ids": tokens, "labels": self._window(start + 1)} if self.return_labels else tokens

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the stream."""
        return self._file.shape[0]

    def fingerprint(self) -> dict[str, Json]:
        """Return what tells these windows from others; part of a loader's state."""
        return {**self._file.fingerprint(), "seq_len": self.seq_len, "return_labels": self.return_labels}

    def close(self) -> None:
        """Let go of the mapping; the next use maps again."""
        self._file.close()

    def _window(self, start: int) -> torch.Tensor:
        # A copy each: a label that is masked must not change an input.
        return torch.from_numpy(self._file.array[start : start + self.seq_len].astype(np.int64))
