"""`metadata.json` beside token files: what they hold, how they were made, and what they must weigh.

It is written last and in one rename, so that data beside it are complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from aioloader.errors import SourceError
from aioloader.protocols import Json
from aioloader.runtime.durable import replace_file
from aioloader.tokens.checksums import file_sha256
from aioloader.tokens.rows import Written

__all__ = [
    "METADATA",
    "SCHEMA_VERSION",
    "FileFacts",
    "Metadata",
    "Part",
    "file_facts",
    "metadata_path",
    "read_metadata",
    "verify",
    "write_metadata",
]

METADATA = "metadata.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """The size and the SHA-256, in hexadecimal, of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One token file of a data set, or the directory itself (`name` "."), with the counts of `Written`."""

    name: str
    num_tokens: int
    num_rows: int | None
    num_documents: int
    dropped_tail: int

    @classmethod
    def of(cls, name: str, written: Written) -> Part:
        """Return the part called `name` that a writer has written."""
        counts = (written.num_tokens, written.num_rows, written.num_documents, written.dropped_tail)
        return cls(name=name, num_tokens=counts[0], num_rows=counts[1], num_documents=counts[2], dropped_tail=counts[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What `metadata.json` says.

    Attributes:
        format: "npy", "pt", "bin" or "mds".
        dtype: NumPy's name of the type on disk.
        seq_len: Tokens in a row; None for a flat stream.
        parts: The token files in order.
        files: Every file of the data set by name, documents and indexes included.
        tokenizer: Its name, hash and which special tokens were added.
        vocab_size: The number of token ids, added ones included.
        eos_id: The token between documents; None for none.
        packing: How documents were laid into rows.
        source: The fingerprint of the input.
        details: Anything else that the maker wants to keep.
    """

    format: str
    dtype: str
    seq_len: int | None
    parts: tuple[Part, ...]
    files: Mapping[str, FileFacts]
    tokenizer: Mapping[str, Json] | None = None
    vocab_size: int | None = None
    eos_id: int | None = None
    packing: str | None = None
    source: Json = None
    details: Mapping[str, Json] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in all parts."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_documents(self) -> int:
        """Return the number of documents in all parts."""
        return sum(part.num_documents for part in self.parts)

    @property
    def dropped_tail(self) -> int:
        """Return the number of tokens that were left out because they did not fill a row."""
        return sum(part.dropped_tail for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (rows, seq_len), or (tokens,) for a flat stream."""
        if self.seq_len is None:
            return (self.num_tokens,)
        return (sum(part.num_rows or 0 for part in self.parts), self.seq_len)


def metadata_path(path: str | Path) -> Path:
    """Return where the metadata of a token file or of a directory of them lie."""
    path = Path(path)
    if path.name == METADATA:
        return path
    return path / METADATA if path.is_dir() else path.with_name(METADATA)


def file_facts(directory: Path, files: Iterable[Path]) -> dict[str, FileFacts]:
    """Return the facts of files by their names inside `directory`; reads each once, in bounded memory."""
    return {path.relative_to(directory).as_posix(): FileFacts(num_bytes=path.stat().st_size, sha256=file_sha256(path)) for path in files}


def write_metadata(path: str | Path, metadata: Metadata) -> Path:
    """Write the metadata of the data set at `path` (a file of it, or its directory) and return where they lie. Atomic and durable."""
    target = metadata_path(path)
    value = {"schema_version": SCHEMA_VERSION, **asdict(metadata), "shape": metadata.shape, "num_tokens": metadata.num_tokens}
    totals = {"num_documents": metadata.num_documents, "dropped_tail": metadata.dropped_tail}
    replace_file(target, json.dumps(value | totals, indent=2, sort_keys=True) + "\n")
    return target


def read_metadata(path: str | Path) -> Metadata:
    """Return the metadata of the data set at `path`: a file of it, its directory, or the metadata themselves.

    Raises:
        SourceError: There are none, they are damaged, or of a version that this one does not know.
    """
    target = metadata_path(path)
    try:
        value = json.loads(target.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceError(f"{target}: expected the metadata of {path}, got no such file; write the data again, or copy it too.") from error
    except (ValueError, OSError) as error:
        raise _damaged(target, error) from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise SourceError(f"{target}: expected schema version {SCHEMA_VERSION}, got {version!r}; read it with the version that wrote it.")
    try:
        return _parse(value)
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(target, error) from error


def verify(path: str | Path) -> Metadata:
    """Check the size and then the SHA-256 of every file of a data set, in bounded memory, and return its metadata.

    Raises:
        SourceError: A file is missing, or has another size or checksum; it names the file, what was expected and what was got.
    """
    metadata = read_metadata(path)
    directory = metadata_path(path).parent
    for name, facts in metadata.files.items():
        file = directory / name
        if not file.is_file():
            raise SourceError(f"{file}: expected {facts.num_bytes} bytes, got no such file; copy it again, or write the data again.")
        _compare(file, "bytes", facts.num_bytes, file.stat().st_size)
    for name, facts in metadata.files.items():
        _compare(directory / name, "SHA-256", facts.sha256, file_sha256(directory / name))
    return metadata


def _compare(file: Path, what: str, expected: object, got: object) -> None:
    if expected != got:
        raise SourceError(f"{file}: expected {what} {expected}, got {got}; copy it again, or write the data again.")


def _parse(value: dict[str, Any]) -> Metadata:
    known = {entry.name: value[entry.name] for entry in fields(Metadata)}
    known["parts"] = tuple(Part(**part) for part in value["parts"])
    known["files"] = {name: FileFacts(**facts) for name, facts in value["files"].items()}
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in known["files"]):
        raise TypeError("a file name that leads out of the directory")
    return Metadata(**known)


def _damaged(target: Path, error: Exception) -> SourceError:
    return SourceError(f"{target}: expected the metadata of token files, got {type(error).__name__}: {error}; write the data again.")
