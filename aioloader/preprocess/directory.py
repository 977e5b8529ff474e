"""The output directory: one builder at a time, known file names, and what of an earlier run is in it."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aioloader.errors import ConfigError, SourceError
from aioloader.preprocess.progress import read_progress
from aioloader.runtime.durable import partial_path
from aioloader.tokens.metadata import METADATA, read_metadata
from aioloader.tokens.writing import documents_path

__all__ = ["OutputDirectory"]

LOCK = ".lock"
PROGRESS = "progress.json"
FAILURES = "failures.jsonl"
FAILURE_LOG = ".failures.log"
MDS_PATTERNS = ("index.json", "shard.*.mds", "documents.npy")


class OutputDirectory:
    """Paths in the directory at `path`, for `num_parts` parts of one format."""

    def __init__(self, path: str, *, format: str, num_parts: int | None) -> None:
        self.path = Path(path)
        self.metadata = self.path / METADATA
        self.progress = self.path / PROGRESS
        self.failures = self.path / FAILURES
        self.failure_log = self.path / FAILURE_LOG
        self._format = format
        self._num_parts = num_parts

    @contextmanager
    def locked(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Make the directory and hold it: another process that wants it waits, and then finds what this one made.

        The lock goes with the process, however it ends; the empty lock file stays.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError("output", expected="a directory", got=f"the file {str(self.path)!r}", do="name a directory, it is made")
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / LOCK, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def data_path(self, part: int) -> Path:
        """Return the token file of a part; of MDS it is a directory, this one where there is one part."""
        if self._format == "mds":
            return self.path if self._num_parts is None else self.path / f"tokens_{part}"
        return self.path / f"{'tokens' if self._num_parts is None else f'tokens_{part}'}.{self._format}"

    def data_files(self) -> list[Path]:
        """Return the files of tokens and document boundaries that are there."""
        found: list[Path] = []
        for part in range(self._num_parts or 1):
            path = self.data_path(part)
            if self._format == "mds":
                found += [file for pattern in MDS_PATTERNS for file in sorted(path.glob(pattern))]
            else:
                found += [file for file in (path, documents_path(self._format, path)) if file.exists()]
        return found

    def refuse_foreign(self) -> None:
        """Refuse to write over files that no run of ours has left.

        Raises:
            ConfigError: There are some.
        """
        foreign = self.data_files()
        if foreign:
            raise ConfigError(
                f"output {str(self.path)!r}",
                expected="a new directory, or that of an earlier run",
                got=f"{foreign[0].name!r}, of which nothing says where it came from",
                do="use --overwrite to replace it",
            )

    def files(self) -> list[Path]:
        """Return the files of a run that are there or may come, whatever its settings; first that which says that it is complete."""
        partial = (partial_path(self.metadata), partial_path(self.progress))
        known = (self.metadata, self.progress, *partial, self.failures, self.failure_log)
        return [*known, *self._listed_files(), *self._begun_files(), *self.data_files()]

    def clear(self) -> None:
        """Remove what an earlier run wrote."""
        for path in self.files():
            path.unlink(missing_ok=True)

    def _listed_files(self) -> list[Path]:
        """Return the files that the metadata name: those of another format, too."""
        try:
            return [self.path / name for name in read_metadata(self.path).files]
        except SourceError:
            return []

    def _begun_files(self) -> list[Path]:
        """Return the token files of an unfinished run, which may be of another format."""
        try:
            found = read_progress(self.progress)
        except (SourceError, OSError):
            return []
        match None if found is None else found.config:
            case {"format": str(format), "per_input": bool(per_input), "inputs": {**inputs}}:
                return OutputDirectory(str(self.path), format=format, num_parts=len(inputs) if per_input else None).data_files()
        return []
