"""Memory-mapped readers of token files: mapped on first use in each process, flat in memory, sent to workers as their path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from aioloader.errors import ConfigError, SourceError
from aioloader.protocols import Json
from aioloader.tokens.dtypes import Tokens, stored_dtype
from aioloader.tokens.extent import Extent, check_extent, file_size, file_version, map_array
from aioloader.tokens.identity import file_identity
from aioloader.tokens.indexing import checked_index
from aioloader.tokens.megatron import read_bin_extent
from aioloader.tokens.metadata import Metadata, metadata_path, read_metadata
from aioloader.tokens.npy import read_npy_extent
from aioloader.tokens.torch_unzip import read_torch_extent

__all__ = ["TokenFile", "TokenRows"]


class TokenFile:
    """The tokens of a .npy, .pt or .bin file as they lie there. The header is checked at once, the values are mapped on first use.

    A file that is to change is replaced, never written in place: the system ends a process that reads where a mapped file was cut off.

    Args:
        path: The file; a relative one is that of the present directory, wherever it is opened.
        dtype: The type of raw tokens in a .bin file that has neither an `.idx` nor metadata beside it.

    Raises:
        ConfigError: It holds something else than integers, or what it holds is not known.
        SourceError: It is damaged.
    """

    def __init__(self, path: str | Path, *, dtype: npt.DTypeLike | None = None) -> None:
        self.path = Path(path).absolute()
        self._given_dtype = dtype
        self._extent = _read_extent(Path(path), dtype)
        self._version = file_version(self.path)
        if self._extent.dtype.kind not in "iu":
            raise ConfigError(str(path), expected="integer tokens", got=f"values of {self._extent.dtype}", do="save token ids")
        check_extent(self.path, self._extent)
        self._array: Tokens | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _open_file, (self.path, self._given_dtype)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {self.dtype.name}{list(self.shape)})"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type on disk."""
        return self._extent.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (rows, seq_len) or (tokens,)."""
        return self._extent.shape

    @property
    def array(self) -> Tokens:
        """Return the tokens, mapped read-only.

        Raises:
            SourceError: The file is no longer the one whose header was read.
        """
        if self._array is None:
            array = map_array(self.path, self._extent)
            if file_version(self.path) != self._version:
                raise SourceError(f"{self.path}: expected the file that was opened, got one that was written since; open it again.")
            self._array = array
        return self._array

    def fingerprint(self) -> dict[str, Json]:
        """Return what tells this file from another, without reading all of it."""
        return {**file_identity(self.path), "dtype": self.dtype.name}

    def close(self) -> None:
        """Let go of the mapping; the next use maps again."""
        self._array = None


class TokenRows:
    """Rows of `seq_len` tokens of a file by index: a table look-up without state.

    Args:
        path: A .npy or .pt file of shape [rows, seq_len], or a .bin file; a last row of that which is not full is left out.
        seq_len: Tokens in a row; where the file or its metadata say it, it has to agree.
        dtype: See `TokenFile`.

    Raises:
        ConfigError: There are no rows, or of another length, or see `TokenFile`.
        SourceError: The file is damaged.
    """

    def __init__(self, path: str | Path, *, seq_len: int | None = None, dtype: npt.DTypeLike | None = None) -> None:
        self._arguments = (Path(path).absolute(), seq_len, dtype)
        self._file = TokenFile(path, dtype=dtype)
        self.seq_len = _row_length(self._file, seq_len)
        shape = self._file.shape
        self._num_rows = shape[0] if len(shape) == 2 else shape[0] // self.seq_len
        self._rows: Tokens | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _open_rows, self._arguments

    def __repr__(self) -> str:
        return f"TokenRows({str(self._file.path)!r}, {self._file.dtype.name}[{self._num_rows}, {self.seq_len}])"

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: SupportsIndex) -> npt.NDArray[np.int64]:
        """Return int64[seq_len], a copy of one row."""
        row: npt.NDArray[np.int64] = self._opened()[checked_index(self, index, self._num_rows)].astype(np.int64)
        return row

    def take(self, indices: Sequence[SupportsIndex]) -> npt.NDArray[np.int64]:
        """Return int64[len(indices), seq_len], copies of these rows in this order."""
        places = [checked_index(self, index, self._num_rows) for index in indices]
        rows = self._opened()[places]
        return rows.astype(np.int64)

    def fingerprint(self) -> dict[str, Json]:
        """Return what tells these rows from others, without reading all of them."""
        return {**self._file.fingerprint(), "seq_len": self.seq_len}

    def close(self) -> None:
        """Let go of the mapping; the next use maps again."""
        self._rows = None
        self._file.close()

    def _opened(self) -> Tokens:
        if self._rows is None:
            flat = self._file.array.reshape(-1)
            self._rows = flat[: self._num_rows * self.seq_len].reshape(self._num_rows, self.seq_len)
        return self._rows


def _open_file(path: Path, dtype: npt.DTypeLike | None) -> TokenFile:
    return TokenFile(path, dtype=dtype)


def _open_rows(path: Path, seq_len: int | None, dtype: npt.DTypeLike | None) -> TokenRows:
    return TokenRows(path, seq_len=seq_len, dtype=dtype)


def _read_extent(path: Path, dtype: npt.DTypeLike | None) -> Extent:
    size = file_size(path)
    match path.suffix:
        case ".npy":
            return read_npy_extent(path)
        case ".pt" | ".pth":
            return read_torch_extent(path)
        case ".bin" if path.with_suffix(".idx").exists():
            return read_bin_extent(path)
        case ".bin":
            return _raw_extent(path, size, dtype)
    raise ConfigError(
        str(path), expected="a .npy, .pt or .bin file", got=f"the suffix {path.suffix!r}", do="write it with aioloader preprocess"
    )


def _raw_extent(path: Path, size: int, dtype: npt.DTypeLike | None) -> Extent:
    """Return the extent of tokens without an index, whose type somebody has to say."""
    metadata = _metadata(path)
    known = dtype if dtype is not None or metadata is None else metadata.dtype
    if known is None:
        raise ConfigError(
            str(path), expected=f"{path.stem}.idx or metadata.json beside it", got="neither", do="copy them too, or give dtype"
        )
    stored = stored_dtype(f"{path} (dtype)", known)
    if size % stored.itemsize:
        raise ConfigError(
            str(path), expected=f"whole tokens of {stored.name}", got=f"{size} bytes", do="give the dtype they were written in"
        )
    return Extent(0, stored, (size // stored.itemsize,))


def _row_length(file: TokenFile, given: int | None) -> int:
    """Return the tokens in a row that the file, its metadata and the caller agree on."""
    if given is not None and (type(given) is not int or given < 1):
        raise ConfigError("seq_len", expected="an int of at least 1", got=repr(given), do="give the tokens in a row")
    shape = file.shape
    if file.path.suffix != ".bin" and len(shape) != 2:
        raise ConfigError(
            str(file.path),
            expected="tokens of shape [rows, seq_len]",
            got=f"shape {list(shape)}",
            do="use MMapTokens(path, seq_len) for a flat stream",
        )
    if file.path.suffix == ".bin":
        metadata = _metadata(file.path)
        known = None if metadata is None else metadata.seq_len
    else:
        known = shape[1]
    if known is not None and given not in (None, known):
        raise ConfigError(f"{file.path} (seq_len)", expected=f"{known}, the length of its rows", got=given, do="leave it out")
    length = known or given
    if type(length) is not int or length < 1:
        raise ConfigError(
            f"{file.path} (seq_len)", expected="the tokens in a row", got=repr(length), do="give seq_len, the file has no rows of its own"
        )
    return length


def _metadata(path: Path) -> Metadata | None:
    """Return the metadata beside the file, if they are about it."""
    if not metadata_path(path).is_file():
        return None
    metadata = read_metadata(path)
    return metadata if any(part.name == path.name for part in metadata.parts) else None
