"""Writers of token files: they stream to disk in flat memory, and go on after an interruption as if there had been none.

    append --> whole rows --> layout (.npy, .pt, .bin, MDS shards)       close: headers and indexes, which hold counts
           |
           +-> document ends --> document log (.idx, .documents.npy)

What has been flushed is named by a position. A writer opened at it cuts off what lies beyond, so that the files of an interrupted
run equal those of an uninterrupted one byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from aioloader.errors import ConfigError, ResumeError
from aioloader.tokens.document_log import DocumentLog, OffsetLog
from aioloader.tokens.dtypes import Tokens, check_tokens, stored_dtype, token_dtype
from aioloader.tokens.flat import FlatLayout
from aioloader.tokens.mds import SIZE_LIMIT_BYTES, MdsLayout
from aioloader.tokens.megatron_writing import LengthLog
from aioloader.tokens.npy import npy_layout
from aioloader.tokens.rows import Layout, Position, RowWriter, Written
from aioloader.tokens.torch_zip import TorchZipLayout

__all__ = ["FORMATS", "Position", "TokenWriter", "Written", "check_tokens", "documents_path", "open_writer", "token_dtype"]

FORMATS = ("bin", "mds", "npy", "pt")
POSITION_VERSION = 1


class TokenWriter(Protocol):
    """What `open_writer` returns."""

    def append(self, tokens: Tokens, document_ends: Sequence[int] | npt.NDArray[np.int64] = ()) -> None:
        """Append tokens, and where documents end, in tokens after the first of these; see `aioloader.tokens.rows.RowWriter`."""

    def flush(self) -> Position:
        """Flush to the disk and return where a new writer can go on; save it before the next call."""

    def close(self) -> Written:
        """Write headers and indexes, close the files and return what they hold; a second call returns the same."""

    def release(self) -> None:
        """Close the descriptors and leave the files as they are, unfinished; to be used where writing failed."""


def open_writer(
    format: str,
    path: str | Path,
    *,
    dtype: npt.DTypeLike,
    seq_len: int | None,
    position: Position | None = None,
    size_limit: int = SIZE_LIMIT_BYTES,
) -> TokenWriter:
    """Return a writer of token files, at the beginning (existing files are replaced) or at a saved position.

    Memory is bounded by one row and one appended array. Nothing can be read before `close`.

    Args:
        format: "npy" and "pt" write [rows, seq_len], or [tokens] where `seq_len` is None, and the document boundaries into
            `<stem>.documents.npy`; "bin" writes Megatron's `.bin` and `.idx`, with one sequence for each document; "mds" writes
            shards and `documents.npy` into the directory `path`.
        path: A file with the suffix of its format, in an existing directory; for "mds" a directory.
        dtype: The integer type on disk, from `token_dtype`; for "pt" int64 is what other readers expect.
        seq_len: Tokens in a row: those after the last full row are left out. None writes all of them as one stream ("mds" has rows only).
        position: What `flush` returned; what was written after it is cut off.
        size_limit: Bytes in a shard of "mds" at most.

    Raises:
        ConfigError: An argument is wrong, or they do not fit each other.
        ResumeError: The position was taken with other arguments.
        SourceError: The files are shorter than the position says.
    """
    path = Path(path)
    stored = stored_dtype(f"open_writer({format!r}, dtype)", dtype)
    _check(format, path, seq_len)
    facts: Position = {"version": POSITION_VERSION, "format": format, "dtype": stored.name, "seq_len": seq_len, "size_limit": size_limit}
    if position is not None:
        _check_position(path, facts, position)
    documents = _open_documents(format, path, stored, position)
    try:
        layout = _open_layout(format, path, stored, seq_len, position, size_limit)
    except BaseException:
        documents.release()
        raise
    return RowWriter(layout, documents, dtype=stored, seq_len=seq_len, facts=facts, position=position)


def documents_path(format: str, path: str | Path) -> Path:
    """Return the file that holds the document boundaries of the data at `path`."""
    path = Path(path)
    match format:
        case "bin":
            return path.with_suffix(".idx")
        case "mds":
            return path / "documents.npy"
        case _:
            return path.with_suffix(".documents.npy")


def _check(format: str, path: Path, seq_len: int | None) -> None:
    if format not in FORMATS:
        raise ConfigError("open_writer(format)", expected=f"one of {', '.join(FORMATS)}", got=repr(format), do="choose one of them")
    if format != "mds" and path.suffix != f".{format}":
        raise ConfigError("open_writer(path)", expected=f"a name that ends in .{format}", got=str(path), do="rename it")
    if seq_len is None and format == "mds":
        raise ConfigError("open_writer('mds', seq_len)", expected="the length of a row", got="None", do="give it, or use another format")
    if seq_len is not None and (type(seq_len) is not int or seq_len < 1):
        raise ConfigError("open_writer(seq_len)", expected="an int of at least 1, or None", got=repr(seq_len), do="give tokens per row")


def _check_position(path: Path, facts: Position, position: Position) -> None:
    differences = [(name, position.get(name), value) for name, value in facts.items() if position.get(name) != value]
    if differences:
        raise ResumeError(
            differences, do="open it with the same arguments, or start afresh without a position", where=f"open_writer({path})"
        )


def _open_documents(format: str, path: Path, dtype: np.dtype[Any], position: Position | None) -> DocumentLog:
    num_documents = None if position is None else position["documents"]
    last_end = 0 if position is None else position["logged_end"]
    where = documents_path(format, path)
    if format == "mds":
        path.mkdir(parents=True, exist_ok=True)
    return LengthLog(where, dtype, num_documents, last_end) if format == "bin" else OffsetLog(where, num_documents)


def _open_layout(format: str, path: Path, dtype: np.dtype[Any], seq_len: int | None, position: Position | None, size_limit: int) -> Layout:
    num_tokens = None if position is None else position["tokens"]
    if format == "npy":
        return npy_layout(path, dtype, seq_len, num_tokens)
    if format == "pt":
        return TorchZipLayout(path, dtype, seq_len, num_tokens, None if position is None else position["layout"])
    if format == "bin":
        return FlatLayout(path, dtype, num_tokens)
    if seq_len is None:
        raise AssertionError("checked before")
    return MdsLayout(path, dtype, seq_len, num_tokens, size_limit)
