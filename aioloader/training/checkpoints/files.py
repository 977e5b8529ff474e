"""The files of a checkpoint: it is written aside, published by one rename, and believed only when complete.

    <directory>/
      .step_00000020.partial/    being written, or left by a crash; never read
      step_00000010/
        checkpoint.json          written last: step, dp_size and the size of every other file
        training.json            step, scheduler and what else is not a tensor
        loader_dp00000.json      the loader state of each data-parallel rank
        .metadata, *.distcp      the tensors, in the format of torch.distributed.checkpoint

No torch here: these are names, JSON and renames.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from aioloader.errors import ConfigError
from aioloader.protocols import Json
from aioloader.runtime.durable import flush_directory, write_file

__all__ = [
    "MANIFEST",
    "TRAINING",
    "complete_checkpoints",
    "latest_checkpoint",
    "loader_file",
    "partial_path",
    "prepare",
    "publish",
    "read_json",
    "read_manifest",
    "remove_older",
    "step_path",
    "write_json",
]

MANIFEST = "checkpoint.json"
TRAINING = "training.json"
FORMAT_VERSION = 1

_PUBLISHED = re.compile(r"step_(\d{8,})")
_ASIDE = re.compile(r"\.step_\d{8,}\.(partial|replaced)")


def step_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies once it is complete."""
    return directory / f"step_{step:08d}"


def partial_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is written: beside its final place, so that a rename publishes it."""
    return directory / f".step_{step:08d}.partial"


def loader_file(dp_rank: int) -> str:
    """Return the name of the file with the loader state of one rank."""
    return f"loader_dp{dp_rank:05d}.json"


def read_json(path: Path) -> Json:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Json) -> None:
    """Write `value` as JSON and flush it to the disk.

    Raises:
        ConfigError: The value does not survive JSON unchanged (a tuple, a number as a key).
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise _not_json(path, str(error)) from error
    # repr, because a NaN must count as unchanged and a tuple, equal or not, must not.
    if repr(json.loads(text)) != repr(value):
        raise _not_json(path, "a value that comes back changed")
    write_file(path, text)


def prepare(directory: Path, step: int) -> Path:
    """Clear what crashed saves have left, and return the new directory to write the checkpoint of `step` in."""
    directory.mkdir(parents=True, exist_ok=True)
    for entry in directory.iterdir():
        if _ASIDE.fullmatch(entry.name) and entry.is_dir():
            shutil.rmtree(entry)
    path = partial_path(directory, step)
    path.mkdir()
    return path


def publish(directory: Path, step: int, dp_size: int) -> Path:
    """Make the checkpoint of `step` visible, complete and durable, in one rename, and return its path.

    Raises:
        ConfigError: A rank's file is missing: the ranks do not share the directory.
    """
    partial, final = partial_path(directory, step), step_path(directory, step)
    missing = [loader_file(rank) for rank in range(dp_size) if not (partial / loader_file(rank)).is_file()]
    if missing:
        raise ConfigError(
            f"save_checkpoint({str(directory)!r})",
            expected="a directory that all ranks share",
            got=f"no {', '.join(missing)} in it",
            do="give a path on a shared file system",
        )
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    write_json(partial / MANIFEST, {"version": FORMAT_VERSION, "step": step, "dp_size": dp_size, "files": files})
    flush_directory(partial)
    replaced = directory / f".step_{step:08d}.replaced"
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    flush_directory(directory)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def read_manifest(path: Path) -> Json | None:
    """Return the manifest of the checkpoint in `path`, or None if it is not complete: a file is missing or cut short."""
    try:
        manifest = read_json(path / MANIFEST)
        sizes = {name: (path / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if sizes == manifest["files"] and manifest.get("version") == FORMAT_VERSION else None


def complete_checkpoints(directory: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Return (step, path) of every complete checkpoint, oldest first."""
    return sorted((step, path) for step, path in _published(Path(directory)) if read_manifest(path) is not None)


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint with the highest step, or None; half-written ones are passed over."""
    found = complete_checkpoints(directory)
    return found[-1][1] if found else None


def remove_older(directory: Path, step: int, keep: int) -> None:
    """Remove all checkpoints but the newest `keep` up to `step`; later ones belong to another run and stay."""
    older = sorted((number, path) for number, path in _published(directory) if number <= step)
    for _, path in older[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def _published(directory: Path) -> Iterator[tuple[int, Path]]:
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        match = _PUBLISHED.fullmatch(path.name)
        if match and path.is_dir():
            yield int(match[1]), path


def _not_json(path: Path, problem: str) -> ConfigError:
    where, do = f"checkpoint, {path.name}", "use dicts with string keys, lists, strings and numbers"
    return ConfigError(where, expected="data that JSON keeps unchanged", got=problem, do=do)
