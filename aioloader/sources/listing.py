"""Turns paths, patterns and directories into one fixed list of files."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from aioloader.errors import ConfigError
from aioloader.protocols import Json

__all__ = ["FileList", "Paths", "is_url", "list_files", "split_paths"]

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")
MAX_FILES_SPELLED_OUT = 16
"""A fingerprint names this many files one by one, so that a difference can be read; it stays a few KiB."""


@dataclass(frozen=True, slots=True)
class FileList:
    """Files in a fixed order.

    Attributes:
        paths: Absolute paths.
        names: The same, relative to the common root, with forward slashes: equal wherever the data lie.
        sizes: Sizes in bytes when the list was made; what is appended later is not read.
    """

    paths: tuple[str, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def fingerprint(self, kind: str) -> dict[str, Json]:
        """Return what identifies the files: names and sizes, one by one where they are few."""
        digest = blake2b(digest_size=16)
        for name, size in zip(self.names, self.sizes, strict=True):
            digest.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
        few = len(self.names) <= MAX_FILES_SPELLED_OUT
        return {
            "kind": kind,
            "num_files": len(self.names),
            "num_bytes": sum(self.sizes),
            "digest": digest.hexdigest(),
            "files": [[name, size] for name, size in zip(self.names, self.sizes, strict=True)] if few else None,
        }


def list_files(where: str, paths: Paths, *, patterns: Iterable[str], root: str | os.PathLike[str] | None = None) -> FileList:
    """Return the files that `paths` names, in the order given; what one directory or pattern matches is sorted.

    A file that is named twice is taken once, where it comes first. Hidden files are found by their own path only.

    Args:
        where: The caller, for error messages.
        paths: A file, a directory (searched to its depths), a glob pattern, or several of them.
        patterns: What a file name must match to be taken from a directory.
        root: The directory that names are relative to; by default the deepest that holds all files.

    Raises:
        ConfigError: Something is missing, matches nothing, is no regular file, is compressed, lies elsewhere than
            in this file system, or is not below `root`.
    """
    found: dict[str, int] = {}
    for path in split_paths(where, paths):
        for name in _expand(where, path, tuple(patterns)):
            found.setdefault(str(Path(name).absolute()), _size(where, name))
    base = Path(root).absolute() if root is not None else Path(os.path.commonpath([str(Path(name).parent) for name in found]))
    names = tuple(_relative(where, name, base) for name in found)
    return FileList(paths=tuple(found), names=names, sizes=tuple(found.values()))


def split_paths(where: str, paths: object) -> list[str]:
    """Return `paths` as a list of at least one path.

    Raises:
        ConfigError: It is empty or holds something else, such as a URL.
    """
    is_several = isinstance(paths, Iterable) and not isinstance(paths, str)
    entries: list[Any] = list(paths) if is_several else [paths]  # type: ignore[call-overload]
    for entry in entries:
        if not isinstance(entry, (str, os.PathLike)) or not isinstance(os.fspath(entry), str) or not os.fspath(entry):
            raise ConfigError(
                where, expected="paths", got=f"{entry!r:.100} among them", do="pass a path, a pattern, a directory or a list of them"
            )
        if is_url(os.fspath(entry)):
            raise ConfigError(where, expected="a local path", got=repr(entry), do="copy the data here, URLs are not read in this version")
    if not entries:
        raise ConfigError(where, expected="at least one path", got="none", do="pass a path, a pattern, a directory or a list of them")
    return [os.fspath(entry) for entry in entries]


def is_url(path: str) -> bool:
    """Return whether `path` names a scheme, as in s3://bucket/key."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.replace("+", "").isalnum()


def _expand(where: str, path: str, patterns: tuple[str, ...]) -> list[str]:
    """Return the files of one entry: (1) a directory, (2) a file, (3) a pattern."""
    if os.path.isdir(path):  # noqa: PTH112 - false, not an OSError, for what cannot be a path, such as a text of 3 KB
        matched = {str(file) for pattern in patterns for file in Path(path).rglob(pattern) if file.is_file() and not _is_hidden(file, path)}
        return _some(where, sorted(matched), f"files named {' or '.join(patterns)} in directory {path!r}")
    if os.path.exists(path):  # noqa: PTH110
        return [path]
    if not glob.has_magic(path):
        raise ConfigError(
            where,
            expected="an existing file or directory",
            got=f"{path!r:.100}",
            do="check the path; it is relative to the working directory",
        )
    return _some(where, sorted(name for name in glob.glob(path, recursive=True) if Path(name).is_file()), f"files that match {path!r:.100}")  # noqa: PTH207


def _some(where: str, names: list[str], expected: str) -> list[str]:
    if not names:
        raise ConfigError(where, expected=expected, got="none", do="check the path and the pattern")
    return names


def _is_hidden(file: Path, directory: str) -> bool:
    return any(part.startswith(".") for part in file.relative_to(directory).parts)


def _size(where: str, name: str) -> int:
    if name.endswith(COMPRESSED_SUFFIXES):
        raise ConfigError(where, expected="plain files", got=repr(name), do="decompress it first, this version reads plain files only")
    facts = Path(name).stat()
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(
            where, expected="regular files", got=repr(name), do="for pipes and devices open the file yourself and use IterableSource"
        )
    return facts.st_size


def _relative(where: str, name: str, base: Path) -> str:
    try:
        return Path(name).relative_to(base).as_posix()
    except ValueError:
        raise ConfigError(
            f"{where}(root=)",
            expected="a directory that holds all files",
            got=f"{str(base)!r}, {name!r} is outside",
            do="pass their common directory or leave root out",
        ) from None
