"""Packed rows laid flat: the segments of a micro-batch, and the arrays that any collator makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aioloader.collate.fields import read_tokens
from aioloader.collate.labels import shift_left
from aioloader.errors import BatchError
from aioloader.protocols import PackedRow

__all__ = ["Layout", "Segment", "lay_out", "packed_arrays"]


class Segment(NamedTuple):
    """A piece of a document in a row: its fields, its tokens (at least one), and where it stands, for messages."""

    fields: Mapping[str, Any]
    tokens: NDArray[np.int64]
    where: str


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat `num_rows * seq_len` tokens as segments: every piece, and the padding at a row's end as a segment of its own.

    Attributes:
        segments: The pieces in order, None for padding.
        document_ids: int32[num_segments], counted from 0 inside each row, -1 for padding.
        borders: int32[num_segments + 1], strictly increasing from 0 to `num_rows * seq_len`.
        shape: (num_rows, seq_len).
    """

    segments: Sequence[Segment | None]
    document_ids: NDArray[np.int32]
    borders: NDArray[np.int32]
    shape: tuple[int, int]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Return int32[num_segments], the tokens in each segment, at least 1."""
        return np.diff(self.borders)

    def token_document_ids(self) -> NDArray[np.int32]:
        """Return int32[num_rows, seq_len], the document of each token."""
        return np.repeat(self.document_ids, self.lengths).reshape(self.shape)

    def token_positions(self) -> NDArray[np.int64]:
        """Return int64[num_rows, seq_len], counted from 0 in each piece, 0 in padding."""
        # Padding counts from its own position, hence from 0 to 0, by starting at each of its tokens.
        flat = np.arange(self.shape[0] * self.shape[1], dtype=np.int64)
        starts = np.repeat(self.borders[:-1], self.lengths)
        is_padding = np.repeat(self.document_ids < 0, self.lengths)
        return (flat - np.where(is_padding, flat, starts)).reshape(self.shape)


def lay_out(rows: Sequence[Any], where: str) -> Layout:
    """Return the layout of packed rows, of which `rows[0]` is known to be one; empty pieces are left out.

    Raises:
        BatchError: The samples are not all packed rows of one `seq_len`, or the pieces of one do not fit or are malformed.
    """
    seq_len = rows[0].seq_len
    segments: list[Segment | None] = []
    ids: list[int] = []
    lengths: list[int] = []
    for index, row in enumerate(rows):
        pieces = _read_row(row, seq_len, f"{where}: sample {index}")
        segments += pieces
        ids += range(len(pieces))
        lengths += [len(piece.tokens) for piece in pieces]
        room = seq_len - sum(len(piece.tokens) for piece in pieces)
        if room:
            segments.append(None)
            ids.append(-1)
            lengths.append(room)
    borders = np.cumsum([0, *lengths], dtype=np.int32)
    return Layout(segments, np.array(ids, dtype=np.int32), borders, (len(rows), seq_len))


def packed_arrays(
    rows: Sequence[Any],
    where: str,
    labels_of: Callable[[Segment], NDArray[np.int64]],
    *,
    pad_token_id: int,
    ignore_index: int,
    shift_labels: bool,
) -> dict[str, NDArray[Any]]:
    """Return the arrays of packed rows that `PretrainCollator` lists; `rows[0]` is known to be a packed row.

    `labels_of` gives a piece's unshifted labels; those of first tokens are then ignored.

    Raises:
        BatchError: See `lay_out`, and what `labels_of` raises.

    Source: the varlen convention of `cu_seqlens` and `max_seqlen` is FlashAttention's (Dao, 2023).
    """
    layout = lay_out(rows, where)
    tokens: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    for segment, length in zip(layout.segments, layout.lengths.tolist(), strict=True):
        tokens.append(np.full(length, pad_token_id, dtype=np.int64) if segment is None else segment.tokens)
        targets.append(np.full(length, ignore_index, dtype=np.int64) if segment is None else labels_of(segment))
    labels = np.concatenate(targets)
    labels[layout.borders[:-1]] = ignore_index
    if shift_labels:
        # One shift of the flat tokens is enough: each row starts with a piece, whose first label is ignored.
        labels = shift_left(labels, ignore_index)
    return {
        "input_ids": np.concatenate(tokens).reshape(layout.shape),
        "labels": labels.reshape(layout.shape),
        "position_ids": layout.token_positions(),
        "document_ids": layout.token_document_ids(),
        "cu_seqlens": layout.borders,
        "max_seqlen": np.array(layout.lengths.max(), dtype=np.int32),
    }


def _read_row(row: Any, seq_len: int, where: str) -> list[Segment]:
    if not isinstance(row, PackedRow):
        got = type(row).__name__
        raise BatchError(f"{where}: expected a PackedRow like sample 0, got {got}; give packed rows or plain samples, not both")
    if row.seq_len != seq_len:
        raise BatchError(f"{where}: expected seq_len={seq_len} like sample 0, got {row.seq_len}; pack all rows of a micro-batch alike")
    places = [f"{where}, piece {number}" for number in range(len(row.pieces))]
    pieces = [Segment(piece, read_tokens(piece, place), place) for piece, place in zip(row.pieces, places, strict=True)]
    num_tokens = sum(len(piece.tokens) for piece in pieces)
    if num_tokens > seq_len:
        raise BatchError(f"{where}: expected at most seq_len={seq_len} tokens in its pieces, got {num_tokens}; cut them at the row's end")
    return [piece for piece in pieces if len(piece.tokens)]
