"""How documents become what is written: batching and collator for each kind of packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aioloader.batching import FixedBatch, Pack
from aioloader.preprocess.options import PreprocessOptions
from aioloader.preprocess.tokenizer import Tokens
from aioloader.protocols import Batching, Collator, Json, PackedRow

__all__ = ["JoinDocuments", "LayRows", "layout_of"]

BATCH_DOCUMENTS = 128
"""Documents handed over at once: enough that the cost of a batch, 0.1 ms, does not count beside that of tokenizing them."""
BATCH_TOKENS = 1 << 16
"""The same for rows."""


@dataclass(frozen=True, slots=True)
class JoinDocuments:
    """Lays documents end to end: `input_ids`, dtype[num_tokens], and `document_ends`, int64[num_documents], offsets in it.

    Documents without a token have no end.
    """

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the joined documents."""
        return _joined([sample["input_ids"] for sample in samples])

    def collate_columns(self, columns: Mapping[Any, Sequence[Any]]) -> dict[str, Any]:
        """Return the same of documents that come in columns."""
        return _joined(list(columns["input_ids"]))

    def fingerprint(self) -> dict[str, Json]:
        """Return what decides the result."""
        return {"kind": "JoinDocuments"}


@dataclass(frozen=True, slots=True)
class LayRows:
    """Lays packed rows: `input_ids`, dtype[num_rows, seq_len], and `document_ends`, int64[num_segments], offsets in the flat rows.

    A segment is a document or a piece of one, or the padding at the end of a row. `row_lengths` is int32[num_rows], without padding.
    """

    dtype: str
    pad: int

    def __call__(self, rows: Sequence[PackedRow]) -> dict[str, Any]:
        """Return the rows."""
        seq_len = rows[0].seq_len
        tokens = np.full((len(rows), seq_len), self.pad, dtype=self.dtype)
        ends: list[int] = []
        for number, row in enumerate(rows):
            at = 0
            for piece in row.pieces:
                ids = piece["input_ids"]
                tokens[number, at : at + len(ids)] = ids
                at += len(ids)
                ends.append(number * seq_len + at)
            if at < seq_len:
                ends.append((number + 1) * seq_len)
        lengths = np.array([row.length for row in rows], dtype=np.int32)
        return {"input_ids": tokens, "document_ends": np.array(ends, dtype=np.int64), "row_lengths": lengths}

    def fingerprint(self) -> dict[str, Json]:
        """Return what decides the result."""
        return {"kind": "LayRows", "dtype": self.dtype, "pad": self.pad}


def layout_of(options: PreprocessOptions, tokens: Tokens) -> tuple[Batching, Collator]:
    """Return how documents are batched and collated. What cuts a stream into rows is the writer."""
    if options.packing != "best_fit":
        return FixedBatch(BATCH_DOCUMENTS), JoinDocuments()
    assert options.seq_len is not None
    assert tokens.pad is not None
    rows = max(1, BATCH_TOKENS // options.seq_len)
    return Pack(options.seq_len, rows, strategy="best_fit"), LayRows(tokens.dtype.name, tokens.pad)


def _joined(documents: list[Any]) -> dict[str, Any]:
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    return {"input_ids": np.concatenate(documents), "document_ends": np.cumsum(lengths[lengths > 0])}
