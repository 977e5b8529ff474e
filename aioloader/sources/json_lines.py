"""A source of JSON Lines files, one record per line."""

from __future__ import annotations

import codecs
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice

from aioloader.errors import ClosedError, SourceError
from aioloader.protocols import Cursor, Json, Record, RecordId, Span
from aioloader.sources.lines import LineCutter
from aioloader.sources.listing import FileList, Paths, list_files
from aioloader.sources.place import cursor_error
from aioloader.sources.pull import PATIENCE_S, source_error
from aioloader.sources.ranges import FETCH_BYTES, FETCH_RANGES, ByteRange, fetch, plan_blocks

__all__ = ["JsonLines"]


class JsonLines:
    """One record, a dict, per line that is not blank; record ids are (file name, line number counted from 0, blank lines included).

    Files are UTF-8, with or without a byte order mark, with either newline, with or without one at the end. They are read in blocks of
    1 MiB, up to four blocks (or 16 small files) at a time; that, and the longest line, is what is held in memory. The list of
    files and their sizes is made here, once: what is appended later is not read. The cursor is [file number, byte offset, line
    number], so resuming reads nothing again.

    Args:
        paths: A file, a directory (searched to its depths for .jsonl and .ndjson), a glob pattern, or several of them. Their
            order is kept; what one directory or pattern matches is sorted.
        root: The directory that names are relative to; by default the deepest that holds all files.

    Raises:
        ConfigError: Nothing is there, or it is compressed.
    """

    def __init__(self, paths: Paths, *, root: str | os.PathLike[str] | None = None) -> None:
        self._files = list_files("JsonLines", paths, patterns=("*.jsonl", "*.ndjson"), root=root)

    def __repr__(self) -> str:
        return f"JsonLines({len(self._files.names)} files)"

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the names and sizes of the files."""
        return self._files.fingerprint("json_lines")

    def open(self, epoch: int, cursor: Cursor | None) -> _LineReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`.

        Raises:
            ResumeError: The cursor is not a place in these files.
        """
        return _LineReader(self._files, cursor)


class _LineReader:
    """Stands before line `_line`, at byte `_offset`, of file `_file`. `_cutter` holds what follows, then come `_blocks`, then `_plan`."""

    def __init__(self, files: FileList, cursor: Cursor | None) -> None:
        self._files = files
        self._file, self._offset, self._line = _checked_place(files, cursor)
        self._plan = plan_blocks(files, self._file, self._offset)
        self._wanted: list[ByteRange] = []
        self._blocks: deque[tuple[ByteRange, bytes | Exception]] = deque()
        self._cutter = LineCutter()
        self._failure: BaseException | None = None
        self._closed = False

    async def read(self, max_records: int) -> Span | None:
        if self._closed:
            raise ClosedError("JsonLines: expected an open reader, got a closed one; open the source again.")
        records: list[Record] = []
        ids: list[RecordId] = []
        deadline = time.monotonic() + PATIENCE_S
        while self._failure is None and len(records) < max_records and not (records and time.monotonic() >= deadline):
            if self._cutter.has_lines:
                self._parse_lines(max_records, deadline, records, ids)
            elif self._blocks:
                self._take_block()
            elif records or not await self._fetch_blocks():
                break
        if self._failure is not None and not records:
            raise self._failure
        return Span(records, ids) if records else None

    def cursor(self) -> Cursor:
        return [self._file, self._offset, self._line]

    async def aclose(self) -> None:
        self._closed = True
        self._blocks.clear()
        self._cutter = LineCutter()

    async def _fetch_blocks(self) -> bool:
        """Read the next blocks at the same time; return whether there are any. Cancelled, it reads the same blocks again."""
        if not self._wanted:
            self._wanted = _some_of(self._plan)
        blocks = await fetch(self._files, self._wanted)
        self._blocks.extend(zip(self._wanted, blocks, strict=True))
        self._wanted = []
        return bool(blocks)

    def _take_block(self) -> None:
        """Go on to the next block, which may be the first one of the next file."""
        place, data = self._blocks.popleft()
        if place.file != self._file:
            self._file, self._offset, self._line = place.file, 0, 0
        if isinstance(data, Exception):
            self._failure = source_error(data, (self._files.names[self._file], self._line))
        else:
            self._cutter.feed(data, is_last=place.is_last)

    def _parse_lines(self, max_records: int, deadline: float, records: list[Record], ids: list[RecordId]) -> None:
        """Add the records of lines at hand, but for blank ones, and step over them; stay before a line that fails."""
        name = self._files.names[self._file]
        take_line = self._cutter.take_line
        while len(records) < max_records and (raw := take_line()) is not None:
            line, num_bytes = raw
            text = line.removeprefix(codecs.BOM_UTF8).strip() if self._offset == 0 else line.strip()
            if text:
                try:
                    record = json.loads(str(text, "utf-8"))
                except (ValueError, RecursionError) as error:
                    self._failure = self._line_error(_reason(error))
                    self._failure.__cause__ = error
                    return
                if type(record) is not dict:
                    self._failure = self._line_error(f"a {type(record).__name__}")
                    return
                records.append(record)
                ids.append((name, self._line))
            self._offset += num_bytes
            self._line += 1
            if time.monotonic() >= deadline:
                return

    def _line_error(self, got: str) -> SourceError:
        where = f"{self._files.paths[self._file]}, line {self._line + 1}"
        return SourceError(
            f"{where}: expected a JSON object, got {got}; mend or remove the line", record=(self._files.names[self._file], self._line)
        )


def _checked_place(files: FileList, cursor: Cursor | None) -> tuple[int, int, int]:
    match cursor:
        case None:
            return (0, 0, 0)
        case [int(file), int(offset), int(line)] if 0 <= file < len(files.sizes) and 0 <= offset <= files.sizes[file] and line >= 0:
            return (file, offset, line)
    raise cursor_error("JsonLines", cursor, "a file number, byte offset and line number inside these files")


def _some_of(plan: Iterator[ByteRange]) -> list[ByteRange]:
    """Return the next ranges that are read at the same time; at least one unless `plan` is through."""
    wanted: list[ByteRange] = []
    num_bytes = 0
    for place in islice(plan, FETCH_RANGES):
        wanted.append(place)
        num_bytes += place.stop - place.start
        if num_bytes >= FETCH_BYTES:
            break
    return wanted


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return f"{type(error).__name__}: {error}"
