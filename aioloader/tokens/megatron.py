"""Megatron's indexed data set, read: sequences and documents by index, memory-mapped."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from aioloader.errors import SourceError
from aioloader.protocols import Json
from aioloader.tokens.dtypes import Tokens
from aioloader.tokens.extent import Extent, file_size, map_array
from aioloader.tokens.identity import file_identity
from aioloader.tokens.indexing import checked_index
from aioloader.tokens.megatron_index import INDEX_HEADER_BYTES, read_index_header

__all__ = ["MegatronTokens", "read_bin_extent"]


class MegatronTokens:
    """The sequences of a `.bin` and its `.idx`, in order. The index answers for lengths and places; tokens are read when asked for.

    Mapped on first use in each process; pickles as its path. `data[i]` is a copy of sequence i in the type on disk.

    Args:
        path: The `.bin` file, the `.idx` file, or what both begin with.

    Raises:
        ConfigError: One of the files is missing.
        SourceError: The index is of another format, or damaged, or does not fit the tokens.
    """

    def __init__(self, path: str | Path) -> None:
        text = str(Path(path).absolute())
        self._prefix = text[:-4] if text.endswith((".bin", ".idx")) else text
        self._bin = Path(f"{self._prefix}.bin")
        self._idx = Path(f"{self._prefix}.idx")
        self._header = read_index_header(self._idx)
        self._extent = read_bin_extent(self._bin)
        self._tokens: Tokens | None = None
        self._index: _Index | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._prefix,)

    def __repr__(self) -> str:
        header = self._header
        return f"MegatronTokens({self._prefix!r}, {header.dtype.name}, {header.num_sequences} sequences, {header.num_documents} documents)"

    def __len__(self) -> int:
        return self._header.num_sequences

    def __getitem__(self, index: SupportsIndex) -> Tokens:
        return self.read(index)

    def fingerprint(self) -> dict[str, Json]:
        """Return what tells these files from others, without reading all of them."""
        return {"tokens": file_identity(self._bin), "index": file_identity(self._idx)}

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type on disk."""
        return self._header.dtype

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, known without reading one."""
        return self._extent.shape[0]

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return self._header.num_documents

    @property
    def modes(self) -> npt.NDArray[np.int8] | None:
        """Return int8[sequences], the kind of each sequence of multimodal data, or None where there are none."""
        return self._opened_index().modes

    def length(self, index: SupportsIndex) -> int:
        """Return the number of tokens of a sequence, without reading them."""
        return int(self._opened_index().lengths[checked_index(self, index, len(self))])

    def read(self, index: SupportsIndex, start: int = 0, stop: int | None = None) -> Tokens:
        """Return a copy of tokens `start` to `stop - 1` of a sequence.

        Raises:
            IndexError: There is no such sequence.
            SourceError: The index points outside the tokens.
        """
        sequence = checked_index(self, index, len(self))
        first, length = self._span(sequence)
        place = slice(*slice(start, stop).indices(length)[:2])
        return self._opened_tokens()[first + place.start : first + max(place.start, place.stop)].copy()

    def document(self, index: SupportsIndex) -> Tokens:
        """Return a copy of the tokens of a document: of all its sequences, in order."""
        place = checked_index(self, index, self.num_documents)
        first, stop = map(int, self._opened_index().documents[place : place + 2])
        if not 0 <= first <= stop <= len(self):
            raise self._damaged(f"document {place} inside the {len(self)} sequences", f"sequences {first} to {stop}")
        pieces = [self.read(sequence) for sequence in range(first, stop)]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    def seek_tokens(self, num_tokens: int) -> tuple[int, int]:
        """Return (document, offset in it) of the token before which there are `num_tokens`; two binary searches.

        For all tokens it is (`num_documents`, 0).

        Raises:
            IndexError: There are not so many tokens.
        """
        if num_tokens == self.num_tokens:
            return self.num_documents, 0
        place = checked_index(self, num_tokens, self.num_tokens)
        index = self._opened_index()
        # bisect, since numpy.searchsorted would copy an index that is not aligned.
        sequence = bisect_right(index.pointers, place * self.dtype.itemsize) - 1
        document = bisect_right(index.documents, sequence) - 1
        first = int(index.documents[document]) if 0 <= document < self.num_documents else -1
        if not 0 <= first <= sequence < len(self):
            raise self._damaged("rising places and documents", f"document {document} for sequence {sequence}")
        return document, place - int(index.pointers[first]) // self.dtype.itemsize

    def close(self) -> None:
        """Let go of the mappings; the next use maps again."""
        self._tokens, self._index = None, None

    def _span(self, sequence: int) -> tuple[int, int]:
        index = self._opened_index()
        first, offset = divmod(int(index.pointers[sequence]), self.dtype.itemsize)
        length = int(index.lengths[sequence])
        if offset or first < 0 or length < 0 or first + length > self.num_tokens:
            got = f"{length} from byte {index.pointers[sequence]} on"
            raise self._damaged(f"sequence {sequence} inside the {self.num_tokens} tokens", got)
        return first, length

    def _damaged(self, expected: str, got: str) -> SourceError:
        return SourceError(f"{self._idx}: expected {expected}, got {got}; copy both files again, or preprocess again.")

    def _opened_tokens(self) -> Tokens:
        if self._tokens is None:
            self._tokens = map_array(self._bin, self._extent)
        return self._tokens

    def _opened_index(self) -> _Index:
        if self._index is None:
            self._index = _Index(self._idx)
        return self._index


class _Index:
    """The mapped arrays of an index."""

    def __init__(self, path: Path) -> None:
        header = read_index_header(path)
        size = file_size(path)
        self._path = path
        self._offset = INDEX_HEADER_BYTES
        self.lengths = self._map("<i4", header.num_sequences)
        self.pointers = self._map("<i8", header.num_sequences)
        self.documents = self._map("<i8", header.num_documents + 1)
        self.modes = self._map("<i1", header.num_sequences) if size >= self._offset + header.num_sequences > self._offset else None

    def _map(self, dtype: str, count: int) -> Tokens:
        extent = Extent(self._offset, np.dtype(dtype), (count,))
        self._offset += extent.num_bytes
        return map_array(self._path, extent)


def read_bin_extent(path: Path) -> Extent:
    """Return where the tokens of a `.bin` lie that has an `.idx` beside it: from its first byte on.

    Raises:
        ConfigError: A file is missing.
        SourceError: They do not belong together, or one is damaged.
    """
    index_path = Path(f"{str(path).removesuffix('.bin')}.idx")
    header = read_index_header(index_path)
    size = file_size(path)
    index = _Index(index_path)
    needed = 0
    if header.num_sequences:
        needed = int(index.pointers[-1]) + int(index.lengths[-1]) * header.dtype.itemsize
    if size < needed or size % header.dtype.itemsize:
        raise SourceError(
            f"{path}: expected {needed} bytes as {index_path.name} says, got {size}; it was cut short or is of another run: copy both "
            "files again, or preprocess again."
        )
    if header.num_sequences != index.documents[-1]:
        raise SourceError(
            f"{index_path}: expected document boundaries up to {header.num_sequences} sequences, got {index.documents[-1]}; copy it "
            "again, or preprocess again."
        )
    return Extent(0, header.dtype, (size // header.dtype.itemsize,))
