"""Finds the source that reads an object: what the loader does with its first argument."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from aioloader.errors import AioLoaderError, ConfigError
from aioloader.protocols import Source
from aioloader.sources.async_iterable import AsyncIterableSource
from aioloader.sources.iterable import IterableSource
from aioloader.sources.json_lines import JsonLines
from aioloader.sources.listing import list_files, split_paths
from aioloader.sources.origin import describe
from aioloader.sources.parquet import ParquetFiles
from aioloader.sources.sequence import SequenceSource
from aioloader.sources.text_files import TextFiles

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["ADAPTER_GROUP", "resolve_source"]

ADAPTER_GROUP = "aioloader.adapters"
"""Entry points of this group are functions `adapt(obj) -> Source | None`."""

WHERE = "Loader(source)"
EXPECTED = "a source, a path, a dataset, a sequence, an iterable, an async iterable or a function that returns one"
JSON_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIXES = frozenset({".parquet"})
FOREIGN_SUFFIXES = frozenset(
    {
        ".arrow",
        ".feather",
        ".tar",
        ".mds",
        ".npy",
        ".npz",
        ".bin",
        ".idx",
        ".csv",
        ".tsv",
        ".json",
        ".gz",
        ".zst",
        ".bz2",
        ".xz",
    }
)


def resolve_source(obj: object) -> Source:
    """Return the source that reads `obj`.

    In this order: (1) a source is returned as it is, (2) paths become `JsonLines` or `TextFiles` by what they match, (3) an installed
    adapter takes its framework's datasets, (4) a sequence, (5) an async iterable, (6) an iterable or a function that returns one.

    Raises:
        ConfigError: `obj` is none of these, or its order would not be stable, or it could mean two things.
    """
    if isinstance(obj, Source) and not isinstance(obj, type):
        return obj
    if _is_paths(obj):
        return _resolve_paths(obj)
    adapted = _adapt(obj)
    if adapted is not None:
        return adapted
    _refuse_ambiguous(obj)
    if _is_sequence(obj):
        return SequenceSource(obj)  # type: ignore[arg-type]
    if hasattr(type(obj), "__aiter__") or inspect.isasyncgenfunction(obj):
        return AsyncIterableSource(obj)  # type: ignore[arg-type]
    if (hasattr(type(obj), "__iter__") or callable(obj)) and not inspect.iscoroutinefunction(obj):
        return IterableSource(obj)  # type: ignore[arg-type]
    raise ConfigError(WHERE, expected=EXPECTED, got=describe(obj), do="give it __iter__, or wrap it in a generator function")


def _is_paths(obj: object) -> bool:
    if isinstance(obj, (list, tuple)):
        return bool(obj) and all(isinstance(entry, (str, PurePath)) for entry in obj)
    return isinstance(obj, (str, PurePath))


def _resolve_paths(paths: Any) -> Source:
    """Choose by the suffixes of the files, so that a directory of JSON Lines is not read as so many texts."""
    is_list = isinstance(paths, (list, tuple))
    where = f"{WHERE}, a list of strings is a list of paths, of records in SequenceSource(...)" if is_list else WHERE
    suffixes = {PurePath(name).suffix.lower() for name in list_files(where, paths, patterns=("*",)).names}
    foreign = sorted(suffixes & FOREIGN_SUFFIXES)
    if foreign:
        raise ConfigError(
            where,
            expected=".jsonl, .ndjson, .parquet or text files",
            got=f"{', '.join(foreign)} files in {split_paths(where, paths)[0]!r}",
            do="convert them, this version does not read them; TextFiles reads any file as text",
        )
    if suffixes <= JSON_SUFFIXES:
        return JsonLines(paths)
    if suffixes == PARQUET_SUFFIXES:
        return ParquetFiles(paths)
    if suffixes & (JSON_SUFFIXES | PARQUET_SUFFIXES):
        raise ConfigError(
            where,
            expected="files of one kind",
            got=", ".join(sorted(suffixes)),
            do="pass JsonLines(...), ParquetFiles(...) or TextFiles(...) with a pattern",
        )
    return TextFiles(paths)


def _adapt(obj: object) -> Source | None:
    """Ask the adapters, unless `obj` is made of Python's own types only."""
    if all(_is_own(kind) for kind in type(obj).__mro__):
        return None
    from importlib.metadata import entry_points  # takes a fifth of the import time of the whole package, seldom needed

    for entry in sorted(entry_points(group=ADAPTER_GROUP), key=lambda entry: entry.name):
        source = _ask(entry, obj)
        if source is not None:
            return source
    return None


def _is_own(kind: type) -> bool:
    module = kind.__module__.partition(".")[0]
    return module in sys.stdlib_module_names or module in {"__main__", "aioloader"}


def _ask(entry: EntryPoint, obj: object) -> Source | None:
    """Return what one adapter makes of `obj`; a broken adapter must not keep others from reading it."""
    try:
        source = entry.load()(obj)
    except AioLoaderError:
        raise
    except Exception as error:  # noqa: BLE001 - named in the warning
        _complain(entry, f"{type(error).__name__}: {error}")
        return None
    if source is None or isinstance(source, Source):
        return source
    _complain(entry, f"a {type(source).__name__}")
    return None


def _complain(entry: EntryPoint, got: str) -> None:
    warnings.warn(
        f"adapter {entry.name} ({entry.value}): expected a source or None, got {got}; mend or uninstall it.", RuntimeWarning, stacklevel=5
    )


def _refuse_ambiguous(obj: object) -> None:
    """Refuse what can be iterated but hardly is a stream of records in a stable order."""
    if isinstance(obj, Mapping) or (hasattr(type(obj), "keys") and hasattr(type(obj), "__getitem__")):
        keys = ", ".join(map(repr, list(obj.keys())[:4])) if isinstance(obj, Mapping) else "keys"
        do = "pass one of its values, as in data['train'], or a list of records"
        raise ConfigError(WHERE, expected=EXPECTED, got=f"a {type(obj).__name__} of {keys}", do=do)
    if isinstance(obj, (set, frozenset)):
        raise ConfigError(WHERE, expected="records in a stable order", got=f"a {type(obj).__name__}", do="pass sorted(records)")
    if isinstance(obj, (bytes, bytearray, memoryview)):
        raise ConfigError(WHERE, expected=EXPECTED, got=f"a {type(obj).__name__}", do="pass a list of records, or a path")


def _is_sequence(obj: object) -> bool:
    """Return whether `obj` is to be read by index.

    Not if its class iterates in a way of its own but only inherits the index: torch's IterableDataset inherits one that fails.
    """
    order = type(obj).__mro__
    indexed = next((rank for rank, kind in enumerate(order) if "__getitem__" in vars(kind)), None)
    iterated = next((rank for rank, kind in enumerate(order) if "__iter__" in vars(kind)), len(order))
    return hasattr(type(obj), "__len__") and indexed is not None and indexed <= iterated
