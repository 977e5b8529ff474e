"""From the inputs named by the user to sources: one for each file of tokens that is written."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any

from aioloader.errors import ConfigError
from aioloader.preprocess.directory import OutputDirectory
from aioloader.preprocess.limited import FirstRecords
from aioloader.preprocess.options import PreprocessOptions
from aioloader.preprocess.raw_lines import RawLines
from aioloader.protocols import Cursor, Json, RecordId, Source
from aioloader.sources.listing import MAX_FILES_SPELLED_OUT, FileList, list_files
from aioloader.sources.parquet import ParquetFiles
from aioloader.sources.resolve import FOREIGN_SUFFIXES, JSON_SUFFIXES
from aioloader.sources.text_files import TextFiles

__all__ = ["Part", "open_adapter", "open_parts", "place_of"]

WHERE = "input"
HUB_PREFIX = "hf:"
PARQUET_SUFFIX = ".parquet"


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes one file of tokens.

    Attributes:
        inputs: The inputs, as they were named.
        source: Their documents in order.
        files: Their files; None for a data set of the hub.
    """

    inputs: tuple[str, ...]
    source: Source
    files: FileList | None

    def fingerprint(self) -> Mapping[str, Json]:
        """Return what identifies the data: names, sizes and times of modification of the files."""
        own = dict(self.source.fingerprint())
        return own if self.files is None else {**own, "modified": _modified(self.files)}

    def limited(self, num_records: int) -> Source:
        """Return the first documents."""
        return FirstRecords(self.source, num_records)

    def fraction(self, cursor: Cursor) -> float | None:
        """Return how much of the bytes of the files come before a cursor of the source, as far as that is known."""
        if self.files is None or not sum(self.files.sizes):
            return None
        inner = cursor["inner"] if isinstance(cursor, Mapping) and "inner" in cursor else cursor
        file, offset = 0, 0
        match inner:
            case int(file):
                pass
            case [int(file), int(offset), _]:
                offset = offset if isinstance(self.source, RawLines) else 0
        return (sum(self.files.sizes[:file]) + offset) / sum(self.files.sizes)


def open_parts(options: PreprocessOptions, output: OutputDirectory) -> list[Part]:
    """Return the parts: one, or one for each input. Files of the output are no input, where it lies in a directory that is.

    Raises:
        ConfigError: An input is missing, or they are of several kinds, or of one that is not read.
    """
    groups = [(one,) for one in options.inputs] if options.per_input else [options.inputs]
    return [_open_part(group, options, output) for group in groups]


def open_adapter(name: str) -> Any:
    """Return a module of `aioloader_adapters`, which know the libraries that the core does not.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(f"aioloader_adapters.{name}")
    except ImportError as error:
        raise ConfigError(
            f"adapter {name}", expected="the package aioloader_adapters, which comes with aioloader", got=str(error), do="install it again"
        ) from error


def place_of(record: RecordId, part: Part) -> str:
    """Return where a document is, for people: `path:line` for lines, `path, row n` for rows, the path for whole files."""
    name, row = record
    path = name if part.files is None else dict(zip(part.files.names, part.files.paths, strict=True)).get(name, name)
    if isinstance(part.source, TextFiles):
        return path
    return f"{path}:{row + 1}" if isinstance(part.source, RawLines) else f"{path}, row {row}"


def _open_part(inputs: tuple[str, ...], options: PreprocessOptions, output: OutputDirectory) -> Part:
    hub = [one for one in inputs if one.startswith(HUB_PREFIX)]
    if hub:
        if len(inputs) > 1:
            raise ConfigError(
                WHERE, expected=f"one data set of the hub alone, {hub[0]!r}", got=f"{len(inputs)} inputs", do="use --per-input"
            )
        name = hub[0].removeprefix(HUB_PREFIX)
        stream = open_adapter("hub_dataset").open_stream(name, config=options.hub_config, split=options.split, field=options.text_field)
        return Part(inputs, stream, None)
    files = _without(output, list_files(WHERE, inputs, patterns=("*",)))
    return Part(inputs, _open_files(files, options), files)


def _without(output: OutputDirectory, files: FileList) -> FileList:
    own = {path.name: path.resolve() for path in output.files()}
    kept = [path for path in files.paths if (known := own.get(Path(path).name)) is None or Path(path).resolve() != known]
    if not kept:
        got = f"nothing but the files of the output {str(output.path)!r}"
        raise ConfigError(WHERE, expected="files to read", got=got, do="name the documents, or another output")
    return files if len(kept) == len(files.paths) else list_files(WHERE, kept, patterns=())


def _open_files(files: FileList, options: PreprocessOptions) -> Source:
    suffixes = {PurePath(name).suffix.lower() for name in files.names}
    root = _root(files)
    if suffixes <= JSON_SUFFIXES:
        return RawLines(files)
    if suffixes == {PARQUET_SUFFIX}:
        return ParquetFiles(files.paths, columns=[options.text_field], root=root)
    if suffixes & (FOREIGN_SUFFIXES | JSON_SUFFIXES):
        got = ", ".join(sorted(suffixes)[:8])
        do = "convert the others, or run once for each kind"
        raise ConfigError(WHERE, expected=".jsonl, .ndjson or .parquet files, or files of text, all of one kind", got=got, do=do)
    return TextFiles(files.paths, errors="surrogateescape", root=root)  # what is not UTF-8 fails in a worker, one document alone


def _root(files: FileList) -> str:
    """Return the directory that the names are relative to."""
    first = PurePath(files.paths[0])
    return str(first.parents[len(PurePath(files.names[0]).parts) - 1])


def _modified(files: FileList) -> Json:
    """Return the times of modification in ns: one by one where the files are few, else their digest."""
    times: Sequence[int] = [Path(path).stat().st_mtime_ns for path in files.paths]
    if len(times) <= MAX_FILES_SPELLED_OUT:
        return list(times)
    return blake2b(" ".join(map(str, times)).encode(), digest_size=16).hexdigest()
