r"""Megatron's indexed data set: raw tokens in `.bin`, and where sequences and documents lie in `.idx`.

    .idx  MMIDIDX\0\0 | uint64 version | uint8 dtype | uint64 S | uint64 D | int32[S] lengths | int64[S] pointers | int64[D] documents
          int8[S] modes (multimodal data only)

Sequences are the rows of the index, documents are runs of sequences; in text data each document is one sequence.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

from pathlib import Path
from struct import pack, unpack
from typing import Any, NamedTuple

import numpy as np

from aioloader.errors import ConfigError, SourceError
from aioloader.tokens.extent import file_size

__all__ = ["INDEX_HEADER_BYTES", "IndexHeader", "index_header", "read_index_header"]

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
"""Of the unmapped format of 2021 and before."""

VERSION = 1
INDEX_HEADER_BYTES = 34
DTYPE_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def index_header(dtype: np.dtype[Any], num_sequences: int, num_documents: int) -> bytes:
    """Return the first `INDEX_HEADER_BYTES` bytes of an index.

    Raises:
        ConfigError: The format has no code for this type.
    """
    codes = {np.dtype(name): code for code, name in DTYPE_CODES.items()}
    if dtype not in codes:
        names = ", ".join(known.name for known in codes)
        raise ConfigError(
            "open_writer('bin', dtype)", expected=names, got=dtype.name, do="use token_dtype(vocab_size, 'bin'), or another format"
        )
    return MAGIC + pack("<QBQQ", VERSION, codes[dtype], num_sequences, num_documents + 1)


class IndexHeader(NamedTuple):
    """What the first `INDEX_HEADER_BYTES` bytes of an index say: the type of the tokens, and how many sequences and documents there are."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int


def read_index_header(path: Path) -> IndexHeader:
    """Return what the header of an `.idx` file says.

    Raises:
        SourceError: It is no such file, of another version, or shorter than it says.
    """
    size = file_size(path)
    with open(path, "rb") as file:
        header = file.read(INDEX_HEADER_BYTES)
    if header.startswith(OLD_MAGIC):
        raise _refusal(path, "the unmapped format of 2021 and before", "convert it with Megatron's tools, or preprocess again")
    if not header.startswith(MAGIC) or len(header) < INDEX_HEADER_BYTES:
        raise _refusal(path, f"a file that starts with {header[:9]!r}", "copy it again, or preprocess again")
    version, code, num_sequences, num_boundaries = unpack("<QBQQ", header[len(MAGIC) :])
    if version != VERSION or code not in DTYPE_CODES:
        raise _refusal(path, f"version {version}, dtype code {code}", "preprocess again")
    needed = INDEX_HEADER_BYTES + 12 * num_sequences + 8 * num_boundaries
    if size < needed or not num_boundaries:
        got = f"{size} bytes where {num_sequences} sequences and {num_boundaries} document boundaries need {needed}"
        raise _refusal(path, got, "it was cut short: copy it again, or preprocess again")
    return IndexHeader(np.dtype(DTYPE_CODES[code]), num_sequences, num_boundaries - 1)


def _refusal(path: Path, got: str, do: str) -> SourceError:
    return SourceError(f"{path}: expected a Megatron index (MMIDIDX, version {VERSION}), got {got}; {do}.")
