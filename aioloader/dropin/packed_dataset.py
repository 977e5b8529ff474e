"""PackedDataset: rows of tokens that were packed offline, memory-mapped, as a map-style data set for torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from aioloader.protocols import Json
from aioloader.tokens.metadata import metadata_path, read_metadata
from aioloader.tokens.reading import TokenRows

__all__ = ["PackedDataset"]


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """The rows of a packed file: `dataset[i]` is `{"input_ids": int64[seq_len]}`, whatever was asked for before and in which process.

    The collator adds labels. Where `metadata.json` beside the file says that rows were filled up (`--packing best_fit`), each comes with
    `loss_mask`, bool[seq_len], False in the padding, which `PretrainCollator` heeds: else a model would learn to go on with padding
    behind the end of a document. The header is checked at once; the values are mapped on first use in each process and pages are
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
        self._padding = _padding_of(Path(path))

    def __repr__(self) -> str:
        return f"PackedDataset({self._rows!r})"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: SupportsIndex) -> dict[str, torch.Tensor]:
        row = self._rows[index]
        if self._padding is None:
            return {"input_ids": torch.from_numpy(row)}
        return {"input_ids": torch.from_numpy(row), "loss_mask": torch.from_numpy(self._padding.loss_mask(row))}

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[dict[str, torch.Tensor]]:
        """Return the rows at these indices, in this order; torch's loaders call it with those of one batch."""
        rows = self._rows.take(indices)
        tokens = torch.from_numpy(rows).unbind()
        if self._padding is None:
            return [{"input_ids": row} for row in tokens]
        masks = torch.from_numpy(self._padding.loss_mask(rows)).unbind()
        return [{"input_ids": row, "loss_mask": mask} for row, mask in zip(tokens, masks, strict=True)]

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


class _Padding(NamedTuple):
    """What fills rows up: a token, which may be the one that ends documents, so that the first of those at the end of a row is none."""

    token: int
    ends_documents: bool

    def loss_mask(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return bool[..., seq_len], False in the padding at the end of each row, and there in a document that is but its end."""
        is_other = rows != self.token
        seq_len = rows.shape[-1]
        lengths = np.where(is_other.any(axis=-1), seq_len - np.argmax(is_other[..., ::-1], axis=-1), 0) + self.ends_documents
        mask: npt.NDArray[np.bool_] = np.arange(seq_len) < lengths[..., None]
        return mask


def _padding_of(path: Path) -> _Padding | None:
    """Return what fills the rows of a file up, None where nothing does or nobody says."""
    metadata = metadata_path(path)
    if not metadata.is_file() or b'"schema_version"' not in metadata.read_bytes():  # the latter: of another program, about something else
        return None
    facts = read_metadata(path)
    token = facts.details.get("padding_id")
    if not isinstance(token, int) or not facts.details.get("padding_tokens") or all(part.name != path.name for part in facts.parts):
        return None
    return _Padding(token, token == facts.eos_id)
