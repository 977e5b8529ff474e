"""Where an unfinished run stands, on disk: replaced in one rename, so that a kill leaves the old place or the new one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aioloader.errors import SourceError
from aioloader.protocols import Json
from aioloader.runtime.durable import replace_file

__all__ = ["DonePart", "Progress", "read_progress", "write_progress"]

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DonePart:
    """What was written for one part, and what became of its documents.

    Attributes:
        name: The token file, relative to the output directory.
        files: All files.
        num_documents: Documents in it; `num_segments` is how many ends were written, those of pieces and padding included.
        num_padding: Tokens of padding.
        failed: (file, row) of each document that was left out because it failed.
        num_read: Documents read, failed ones included.
    """

    name: str
    files: tuple[str, ...]
    num_tokens: int
    num_rows: int | None
    num_segments: int
    dropped_tail: int
    num_documents: int
    num_padding: int
    failed: tuple[tuple[str, int], ...]
    num_read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A place to go on from.

    Attributes:
        config: What decides the output, see `aioloader.preprocess.plan`.
        done: The parts that are written.
        state: The loader's state in the next part; None: its beginning.
        position: That of the writer.
        num_padding: Padding written so far in this part.
    """

    config: Mapping[str, Json]
    done: tuple[DonePart, ...] = ()
    state: Json = None
    position: Json = None
    num_padding: int = 0


def write_progress(path: Path, progress: Progress) -> None:
    """Replace what is at `path`, durably."""
    replace_file(path, json.dumps({"version": VERSION, **asdict(progress)}))


def read_progress(path: Path) -> Progress | None:
    """Return what was written, None if nothing was.

    Raises:
        SourceError: It is damaged, or of another version.
    """
    try:
        saved: Any = json.loads(path.read_text(encoding="utf-8"))
        version = saved.pop("version")
        if version != VERSION:
            raise ValueError(f"version {version!r}")
        saved["done"] = tuple(_done_part(**part) for part in saved["done"])
        return Progress(**saved)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SourceError(
            f"{path}: expected the place of an unfinished run, got {type(error).__name__}: {error}; start anew with --overwrite"
        ) from error


def _done_part(*, files: list[str], failed: list[list[Any]], **counts: Any) -> DonePart:
    return DonePart(files=tuple(files), failed=tuple((name, row) for name, row in failed), **counts)
