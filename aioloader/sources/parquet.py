"""A source of Parquet files, one record per row."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aioloader.errors import ClosedError, ConfigError
from aioloader.protocols import Cursor, Json, Record, Span
from aioloader.sequences import RowIds
from aioloader.sources.listing import FileList, Paths, list_files
from aioloader.sources.place import cursor_error
from aioloader.sources.pull import source_error

__all__ = ["ParquetFiles"]

BATCH_ROWS = 256
"""Rows decoded at once; a row group is never held whole."""

GroupSizes = tuple[tuple[int, ...], ...]
"""The rows of each row group of each file."""


class ParquetFiles:
    """One record, a dict of columns, per row; record ids are (file name, row).

    Files are read one after another, in the order of their row groups. The cursor is [file number, row group, row in it]: resuming skips
    what comes before inside one row group. The list of files is made here, once.

    Args:
        paths: A file, a directory (searched to its depths for .parquet), a glob pattern, or several of them. Their order is kept; what
            one directory or pattern matches is sorted.
        columns: The columns to read; None: all.
        root: The directory that names are relative to; by default the deepest that holds all files.

    Raises:
        ConfigError: Nothing is there, a file is not Parquet or lacks a column, or pyarrow is not installed.
    """

    def __init__(self, paths: Paths, *, columns: Sequence[str] | None = None, root: str | os.PathLike[str] | None = None) -> None:
        self._files = list_files("ParquetFiles", paths, patterns=("*.parquet",), root=root)
        self._columns = None if columns is None else list(columns)
        parquet = _pyarrow_parquet()
        self._group_sizes = tuple(_group_sizes(parquet, path, self._columns or []) for path in self._files.paths)

    def __repr__(self) -> str:
        return f"ParquetFiles({len(self._files.names)} files)"

    @property
    def files(self) -> FileList:
        """Return the files."""
        return self._files

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the names and sizes of the files, and the columns."""
        return {**self._files.fingerprint("parquet"), "columns": self._columns}

    def open(self, epoch: int, cursor: Cursor | None) -> _RowReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`.

        Raises:
            ResumeError: The cursor is not a place in these files.
        """
        return _RowReader(self._files, self._group_sizes, self._columns, cursor)


class _RowReader:
    """Stands before row `_row` of row group `_group` of file `_file`; `_rest` are the decoded rows from there on."""

    def __init__(self, files: FileList, group_sizes: GroupSizes, columns: list[str] | None, cursor: Cursor | None) -> None:
        self._files = files
        self._group_sizes = group_sizes
        self._columns = columns
        self._file, self._group, self._row = _checked_place(group_sizes, cursor)
        self._open: Any = None
        self._batches: Iterator[Any] | None = None
        self._rest: list[Record] = []
        self._failure: BaseException | None = None
        self._closed = False

    def read(self, max_records: int) -> Span | None:
        if self._closed:
            raise ClosedError("ParquetFiles: expected an open reader, got a closed one; open the source again.")
        if self._failure is not None:
            raise self._failure
        try:
            while not self._rest and self._file < len(self._files.paths):
                self._decode()
        except Exception as error:
            self._failure = source_error(error, (self._files.names[self._file], self._place_in_file()))
            raise self._failure from error
        if not self._rest:
            return None
        records, self._rest = self._rest[:max_records], self._rest[max_records:]
        first = self._place_in_file()
        self._row += len(records)
        return Span(records, RowIds(self._files.names[self._file], range(first, first + len(records))))

    def cursor(self) -> Cursor:
        return [self._file, self._group, self._row]

    def close(self) -> None:
        self._closed = True
        self._rest = []
        self._close_file()

    def _decode(self) -> None:
        """Decode the next rows; at the end of a row group or a file go on to the next."""
        sizes = self._group_sizes[self._file]
        if self._group == len(sizes):
            self._close_file()
            self._file, self._group, self._row = self._file + 1, 0, 0
        elif self._row == sizes[self._group]:
            self._batches = None
            self._group, self._row = self._group + 1, 0
        elif self._batches is None:
            self._start_group()
        else:
            self._rest = next(self._batches).to_pylist()

    def _start_group(self) -> None:
        """Begin to read the row group, and step over what is before the place in it."""
        if self._open is None:
            self._open = _pyarrow_parquet().ParquetFile(self._files.paths[self._file])
        self._batches = self._open.iter_batches(BATCH_ROWS, row_groups=[self._group], columns=self._columns, use_threads=False)
        left = self._row
        while left:
            batch = next(self._batches)
            self._rest = batch.slice(left).to_pylist()
            left -= min(left, batch.num_rows)

    def _place_in_file(self) -> int:
        return sum(self._group_sizes[self._file][: self._group]) + self._row

    def _close_file(self) -> None:
        self._batches = None
        if self._open is not None:
            self._open.close()
            self._open = None


def _pyarrow_parquet() -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError("ParquetFiles", expected="the library pyarrow", got="none", do="pip install 'aioloader[hf]'") from error


def _group_sizes(parquet: Any, path: str, columns: Sequence[str]) -> tuple[int, ...]:
    """Return the rows of each row group of a file that has these columns."""
    try:
        facts = parquet.read_metadata(path)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError("ParquetFiles", expected="Parquet files", got=f"{path!r} ({reason})", do="check the file") from error
    present = facts.schema.to_arrow_schema().names
    missing = [name for name in columns if name not in present]
    if missing:
        raise ConfigError(
            "ParquetFiles(columns=)", expected=f"columns of {path!r}: {', '.join(present)}", got=", ".join(missing), do="name one of them"
        )
    return tuple(facts.row_group(group).num_rows for group in range(facts.num_row_groups))


def _checked_place(group_sizes: GroupSizes, cursor: Cursor | None) -> tuple[int, int, int]:
    """Return the place of a cursor: before a row, or behind the last of a row group or of all files."""
    match cursor:
        case None:
            return (0, 0, 0)
        case [file, 0, 0] if type(file) is int and file == len(group_sizes):
            return (file, 0, 0)
        case [file, group, row] if all(type(part) is int and part >= 0 for part in cursor) and file < len(group_sizes):
            sizes = group_sizes[file]
            if group <= len(sizes) and row <= (sizes[group] if group < len(sizes) else 0):
                return (file, group, row)
    raise cursor_error("ParquetFiles", cursor, "a file number, row group and row inside these files")
