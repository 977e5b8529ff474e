"""The lines of files as they are, so that they are parsed by the workers: one line that cannot be parsed is one record that fails."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import BinaryIO

from aioloader.errors import ClosedError, SourceError
from aioloader.protocols import Cursor, Json, RecordId, Span
from aioloader.sources.listing import FileList
from aioloader.sources.place import cursor_error
from aioloader.sources.pull import source_error

__all__ = ["RawLines"]

READ_BYTES = 1 << 18
"""Lines are taken from a file so many bytes at a time, and one whole line where it is longer."""


class RawLines:
    """One record, `bytes`, per line that is not blank, without its end; record ids are (file name, line number counted from 0).

    What was appended to a file since the list was made is not read. The cursor is [file number, byte offset, line number].
    """

    def __init__(self, files: FileList) -> None:
        self.files = files

    def __repr__(self) -> str:
        return f"RawLines({len(self.files.names)} files)"

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the names and sizes of the files."""
        return self.files.fingerprint("raw_lines")

    def open(self, epoch: int, cursor: Cursor | None) -> _LineReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`.

        Raises:
            ResumeError: The cursor is not a place in these files.
        """
        return _LineReader(self.files, cursor)


class _LineReader:
    """Stands before line `_line`, at byte `_offset`, of file `_file`; `_lines` are read and come next, in reverse."""

    def __init__(self, files: FileList, cursor: Cursor | None) -> None:
        self._files = files
        self._file, self._offset, self._line = _checked_place(files, cursor)
        self._open: BinaryIO | None = None
        self._lines: list[bytes] = []
        self._failure: BaseException | None = None
        self._closed = False

    def read(self, max_records: int) -> Span | None:
        if self._closed:
            raise ClosedError("RawLines: expected an open reader, got a closed one; open the source again.")
        if self._failure is not None:
            raise self._failure
        records: list[bytes] = []
        ids: list[RecordId] = []
        try:
            while len(records) < max_records and (self._lines or (not records and self._read_lines())):
                self._take_line(records, ids)
        except Exception as error:
            self._failure = source_error(error, (self._files.names[self._file], self._line))
            raise self._failure from error
        return Span(records, ids) if records else None

    def cursor(self) -> Cursor:
        return [self._file, self._offset, self._line]

    def close(self) -> None:
        self._closed = True
        self._close_file()

    def _take_line(self, records: list[bytes], ids: list[RecordId]) -> None:
        line = self._lines.pop()
        text = (line.removeprefix(codecs.BOM_UTF8) if self._offset == 0 else line).strip()
        if text:
            records.append(text)
            ids.append((self._files.names[self._file], self._line))
        self._offset += len(line)
        self._line += 1

    def _read_lines(self) -> bool:
        """Read more lines, of the next file where one is through; return whether there is anything."""
        while self._file < len(self._files.sizes):
            left = self._files.sizes[self._file] - self._offset
            if left:
                self._lines = self._next_lines(left)
                return True
            if self._file + 1 == len(self._files.sizes):
                break
            self._close_file()
            self._file, self._offset, self._line = self._file + 1, 0, 0
        return False

    def _next_lines(self, left: int) -> list[bytes]:
        """Return the next lines in reverse; the last one ends where the file ended when it was listed."""
        if self._open is None:
            self._open = open(self._files.paths[self._file], "rb")  # noqa: SIM115 - closed by `close`, or before the next file
            self._open.seek(self._offset)
        lines = self._open.readlines(min(READ_BYTES, left))
        surplus = sum(map(len, lines)) - left  # of a file that grew: of its last line, and of lines after that
        while surplus > 0:
            last = lines.pop()
            if surplus < len(last):
                lines.append(last[: len(last) - surplus])
            surplus -= len(last)
        if not lines:
            name = self._files.names[self._file]
            raise SourceError(
                f"{self._files.paths[self._file]}: expected {left} more bytes, got the end; the file shrank since it was listed",
                record=(name, self._line),
            )
        lines.reverse()
        return lines

    def _close_file(self) -> None:
        self._lines = []
        if self._open is not None:
            self._open.close()
            self._open = None


def _checked_place(files: FileList, cursor: Cursor | None) -> tuple[int, int, int]:
    match cursor:
        case None:
            return (0, 0, 0)
        case [file, offset, line] if all(type(part) is int and part >= 0 for part in cursor):
            if file < len(files.sizes) and offset <= files.sizes[file]:
                return (file, offset, line)
    raise cursor_error("RawLines", cursor, "a file number, byte offset and line number inside these files")
