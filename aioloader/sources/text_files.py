"""A source of text files, one record each."""

from __future__ import annotations

import codecs
import os
from collections.abc import Mapping

from aioloader.errors import ClosedError, ConfigError
from aioloader.protocols import Cursor, Json, Record, RecordId, Span
from aioloader.sources.listing import FileList, Paths, list_files
from aioloader.sources.place import cursor_error
from aioloader.sources.pull import source_error
from aioloader.sources.ranges import FETCH_BYTES, FETCH_RANGES, ByteRange, fetch

__all__ = ["TextFiles"]


class TextFiles:
    """One record per file, `{"text": its content, "path": its name}`; record ids are (name, 0).

    Names are relative to `root`, so they are the same wherever the data lie. Newlines are kept as they are, a UTF-8 byte order
    mark is not part of the text. Files are read several at a time (at most 16, or 4 MiB where they are large). The list is made
    here, once: it does not change while training runs.

    Args:
        paths: A file, a directory (searched to its depths), a glob pattern, or several of them. Their order is kept; what one
            directory or pattern matches is sorted.
        encoding: Of the files.
        errors: What to do with bytes that are not in this encoding: "strict" fails at that record, "replace", "ignore", ...
        pattern: What a file name must match to be taken from a directory.
        root: The directory that names are relative to; by default the deepest that holds all files.

    Raises:
        ConfigError: Nothing is there, or an option is not known.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
        pattern: str = "*",
        root: str | os.PathLike[str] | None = None,
    ) -> None:
        try:
            name = codecs.lookup(encoding).name
            codecs.lookup_error(errors)
        except LookupError as error:
            raise ConfigError(
                "TextFiles(encoding=, errors=)", expected="names that Python knows", got=str(error), do="see the codecs module"
            ) from error
        self._encoding = "utf-8-sig" if name == "utf-8" else name
        self._errors = errors
        self._files = list_files("TextFiles", paths, patterns=(pattern,), root=root)

    def __repr__(self) -> str:
        return f"TextFiles({len(self._files.names)} files)"

    @property
    def num_records(self) -> int:
        """Return the number of files."""
        return len(self._files.names)

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the names and sizes of the files, and how they are decoded."""
        return {**self._files.fingerprint("text_files"), "encoding": self._encoding, "errors": self._errors}

    def open(self, epoch: int, cursor: Cursor | None) -> _TextReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`. The cursor is the number of the next file.

        Raises:
            ResumeError: The cursor is not the number of a file.
        """
        return _TextReader(self._files, self._encoding, self._errors, cursor)


class _TextReader:
    def __init__(self, files: FileList, encoding: str, errors: str, cursor: Cursor | None) -> None:
        index = 0 if cursor is None else cursor
        if type(index) is not int or not 0 <= index <= len(files.names):
            raise cursor_error("TextFiles", cursor, f"a file number from 0 to {len(files.names)}")
        self._files = files
        self._encoding = encoding
        self._errors = errors
        self._next = index
        self._failure: BaseException | None = None
        self._closed = False

    async def read(self, max_records: int) -> Span | None:
        if self._closed:
            raise ClosedError("TextFiles: expected an open reader, got a closed one; open the source again.")
        if self._failure is not None:
            raise self._failure
        wanted = self._plan(min(max_records, FETCH_RANGES))
        if not wanted:
            return None
        records: list[Record] = []
        ids: list[RecordId] = []
        for data, file in zip(await fetch(self._files, wanted), wanted, strict=True):
            name = self._files.names[file.file]
            try:
                records.append({"text": self._decode(data), "path": name})
            except Exception as error:  # noqa: BLE001 - raised after the records before it
                self._failure = source_error(error, (name, 0))
                break
            ids.append((name, 0))
        self._next += len(records)
        if self._failure is not None and not records:
            raise self._failure
        return Span(records, ids)

    def cursor(self) -> Cursor:
        return self._next

    async def aclose(self) -> None:
        self._closed = True

    def _plan(self, max_files: int) -> list[ByteRange]:
        """Return the next files to read at the same time, at least one unless all are read."""
        wanted: list[ByteRange] = []
        num_bytes = 0
        for index, size in enumerate(self._files.sizes[self._next : self._next + max_files], start=self._next):
            num_bytes += size
            if wanted and num_bytes > FETCH_BYTES:
                break
            wanted.append(ByteRange(index, 0, size, is_last=True))
        return wanted

    def _decode(self, data: bytes | Exception) -> str:
        if isinstance(data, Exception):
            raise data
        return data.decode(self._encoding, self._errors)
