"""The writer of every format: cuts the stream of tokens into rows, keeps document ends, and knows where it stands."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from aioloader.errors import ConfigError
from aioloader.protocols import Json
from aioloader.tokens.document_log import DocumentLog
from aioloader.tokens.dtypes import Tokens, check_tokens

__all__ = ["Layout", "Position", "RowWriter", "Written"]

Position: TypeAlias = dict[str, Json]
"""Where a writer stood when it was last flushed. JSON; `position["files"]` holds the length of each file in bytes."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a closed writer has written.

    Attributes:
        num_tokens: Tokens in the files.
        num_rows: Rows of `seq_len` tokens; None for a flat stream.
        num_documents: Documents with at least one token in the files.
        dropped_tail: Tokens after the last full row, which were left out.
        files: The files, data first.
    """

    num_tokens: int
    num_rows: int | None
    num_documents: int
    dropped_tail: int
    files: tuple[Path, ...]


class Layout(Protocol):
    """The bytes of one format."""

    def write(self, tokens: Tokens) -> None:
        """Append contiguous 1-D tokens of the stored type."""

    def sync(self) -> dict[str, int]:
        """Flush to the disk and return the length of each open file by name."""

    def state(self) -> Json:
        """Return what is needed beside the number of tokens to go on from here."""

    def finish(self, num_tokens: int) -> list[Path]:
        """Write what comes last and return the files."""

    def release(self) -> None:
        """Close descriptors; safe to call twice."""


class RowWriter:
    """Writes whole rows only: tokens that do not fill one are held back (fewer than `seq_len`), and are part of the position.

    Args:
        layout: Takes the tokens, opened where `position` says.
        documents: Takes the document ends, likewise.
        dtype: The type of the tokens on disk.
        seq_len: Tokens in a row; None for a flat stream.
        facts: What a position must agree on (format, dtype, seq_len), copied into it.
        position: Where to go on.
    """

    def __init__(
        self,
        layout: Layout,
        documents: DocumentLog,
        *,
        dtype: np.dtype[Any],
        seq_len: int | None,
        facts: Position,
        position: Position | None = None,
    ) -> None:
        self._layout = layout
        self._documents = documents
        self._dtype = dtype
        self._seq_len = seq_len
        self._facts = facts
        self._num_written = 0
        self._num_documents = 0
        self._logged_end = 0
        self._held: Tokens = np.empty(0, dtype)
        self._held_ends = np.empty(0, np.int64)
        self._written: Written | None = None
        if position is not None:
            self._load(position)

    def append(self, tokens: Tokens, document_ends: Sequence[int] | npt.NDArray[np.int64] = ()) -> None:
        """Append tokens to the stream.

        Args:
            tokens: int[n] of any n, or int[rows, seq_len].
            document_ends: Where documents end, in tokens after the first of these; rising. 0 is a document that ended with the
                tokens of the call before.

        Raises:
            ConfigError: A token does not fit the type, or the shape or the ends are not as said.
        """
        flat = self._flatten(tokens)
        self._take_ends(np.asarray(document_ends, dtype=np.int64), flat.size)
        num_held = 0 if self._seq_len is None else (self._held.size + flat.size) % self._seq_len
        if num_held >= flat.size:
            self._held = np.concatenate([self._held, flat])
            return
        num_now = flat.size - num_held
        self._write(self._held)
        self._write(flat[:num_now])
        self._held = flat[num_now:].copy()
        self._log_ends()

    def flush(self) -> Position:
        """Flush to the disk and return where a new writer can go on; save it before the next call."""
        files = self._layout.sync() | self._documents.sync()
        return {
            **self._facts,
            "tokens": self._num_written,
            "documents": self._num_documents,
            "logged_end": self._logged_end,
            "held": base64.b64encode(self._held.tobytes()).decode("ascii"),
            "held_ends": self._held_ends.tolist(),
            "layout": self._layout.state(),
            "files": files,
        }

    def close(self) -> Written:
        """Write headers and indexes, close the files and return what they hold; a second call returns the same.

        Tokens after the last full row are left out. A document that is open at the end ends there.
        """
        if self._written is None:
            dropped_tail = self._held.size
            if self._logged_end < self._num_written:
                self._held_ends = np.array([self._num_written], dtype=np.int64)
                self._log_ends()
            files = self._layout.finish(self._num_written) + self._documents.finish()
            self.release()
            num_rows = None if self._seq_len is None else self._num_written // self._seq_len
            unique = tuple(dict.fromkeys(files))
            self._written = Written(self._num_written, num_rows, self._num_documents, dropped_tail, unique)
        return self._written

    def release(self) -> None:
        """Close the descriptors and leave the files as they are, unfinished; to be used where writing failed."""
        self._layout.release()
        self._documents.release()

    def _flatten(self, tokens: Tokens) -> Tokens:
        """Return 1-D contiguous tokens of the stored type."""
        array = np.asarray(tokens)
        if array.ndim != 1 and (array.ndim != 2 or array.shape[1] != self._seq_len):
            expected = "tokens of shape [n]" if self._seq_len is None else f"tokens of shape [n] or [rows, {self._seq_len}]"
            raise ConfigError("append", expected=expected, got=f"shape {list(array.shape)}", do="reshape them, or open the writer for it")
        return np.ascontiguousarray(check_tokens(array, self._dtype, "append").reshape(-1))

    def _take_ends(self, ends: npt.NDArray[np.int64], num_tokens: int) -> None:
        if not ends.size:
            return
        start = self._num_written + self._held.size
        before = int(self._held_ends[-1]) if self._held_ends.size else self._logged_end
        is_rising = ends.ndim == 1 and ends[0] > before - start and bool((np.diff(ends) > 0).all())
        if not is_rising or ends[-1] > num_tokens:
            raise ConfigError(
                "append(document_ends)",
                expected=f"rising offsets above {max(before - start, -1)} and up to {num_tokens}",
                got=str(ends.tolist()[:20]),
                do="give the end of each document once, and leave out documents without a token",
            )
        self._held_ends = np.concatenate([self._held_ends, ends + start])

    def _write(self, tokens: Tokens) -> None:
        if tokens.size:
            self._layout.write(tokens)
            self._num_written += tokens.size

    def _log_ends(self) -> None:
        """Log the ends up to what is written."""
        num_now = int(np.searchsorted(self._held_ends, self._num_written, side="right"))
        if num_now:
            self._documents.append(self._held_ends[:num_now])
            self._logged_end = int(self._held_ends[num_now - 1])
            self._num_documents += num_now
            self._held_ends = self._held_ends[num_now:]

    def _load(self, position: Position) -> None:
        self._num_written = position["tokens"]
        self._num_documents = position["documents"]
        self._logged_end = position["logged_end"]
        self._held = np.frombuffer(base64.b64decode(position["held"]), self._dtype)
        self._held_ends = np.array(position["held_ends"], dtype=np.int64)
