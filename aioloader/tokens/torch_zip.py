"""The .pt layout: what `torch.load(path, mmap=True, weights_only=True)` reads as one tensor. Written without torch.

    local header of data/0, padded to 128 bytes
    the values, streamed
    data.pkl, byteorder, version: small entries
    central directory (ZIP64 where needed)

torch finds entries by the central directory, so that the tensor may come first although its size is known last.

Source: torch.save's archive (torch/serialization.py, `_rebuild_tensor_v2` and `_v3` in torch/_utils.py); APPNOTE.TXT 6.3 for ZIP.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np

from aioloader.errors import ConfigError
from aioloader.protocols import Json
from aioloader.tokens.append_file import AppendFile
from aioloader.tokens.dtypes import Tokens

__all__ = ["DATA_START", "TORCH_DTYPES", "TorchZipLayout", "tensor_pickle"]

DATA_START = 128
"""Where the values begin; torch aligns them to 64 bytes."""

TORCH_DTYPES = {
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
}
"""By NumPy's name: the typed storage, or for types without one the name of the torch dtype."""

ARCHIVE = b"tokens"
LARGE = 0xFFFFFFFF
VERSION_NEEDED = 45  # ZIP64
DOS_DATE = (1 << 5) | 1  # 1980-01-01: the same bytes whenever written


class TorchZipLayout:
    """One .pt file with a tensor of shape [tokens] or [rows, seq_len]."""

    def __init__(self, path: Path, dtype: np.dtype[Any], seq_len: int | None, num_tokens: int | None, state: Json) -> None:
        if dtype.name not in TORCH_DTYPES:
            raise ConfigError("open_writer('pt', dtype)", expected=", ".join(TORCH_DTYPES), got=dtype.name, do="choose one of them")
        self._dtype = dtype
        self._seq_len = seq_len
        self._crc = 0 if num_tokens is None else int(state)
        self._file = AppendFile(path, _data_header(0, 0), None if num_tokens is None else num_tokens * dtype.itemsize)

    def write(self, tokens: Tokens) -> None:
        """Append tokens of the flat stream."""
        data = tokens.data.cast("B")
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)

    def sync(self) -> dict[str, int]:
        """Flush to the disk; see `aioloader.tokens.rows.Layout`."""
        return {self._file.path.name: self._file.sync()}

    def state(self) -> Json:
        """Return the checksum so far."""
        return self._crc

    def finish(self, num_tokens: int) -> list[Path]:
        """Write the entries that hold the shape, and the directory."""
        num_bytes = num_tokens * self._dtype.itemsize
        shape = (num_tokens,) if self._seq_len is None else (num_tokens // self._seq_len, self._seq_len)
        directory = [_directory_entry(b"data/0", self._crc, num_bytes, 0)]
        for name, content in ((b"data.pkl", tensor_pickle(self._dtype, shape)), (b"byteorder", b"little"), (b"version", b"3\n")):
            start = DATA_START + self._file.num_data_bytes
            crc = zlib.crc32(content)
            self._file.write(_local_header(name, crc, len(content), len(content), b"") + content)
            directory.append(_directory_entry(name, crc, len(content), start))
        self._file.write(_directory(directory, DATA_START + self._file.num_data_bytes))
        self._file.replace_header(_data_header(self._crc, num_bytes))
        self._file.sync()
        return [self._file.path]

    def release(self) -> None:
        """Close the descriptor."""
        self._file.release()


def tensor_pickle(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the pickle, protocol 2, of a contiguous CPU tensor whose storage is entry `data/0`."""
    kind = TORCH_DTYPES[dtype.name]
    is_typed = kind.endswith("Storage")
    num_values = int(np.prod(shape, dtype=np.int64))
    # An untyped storage counts bytes, a typed one values.
    storage = b"ctorch\n" + kind.encode() + b"\n" if is_typed else b"ctorch.storage\nUntypedStorage\n"
    num_units = num_values if is_typed else num_values * dtype.itemsize
    strides = (1,) if len(shape) == 1 else (shape[1], 1)
    rebuild = b"_rebuild_tensor_v2" if is_typed else b"_rebuild_tensor_v3"
    persistent_id = b"(" + _text("storage") + storage + _text("0") + _text("cpu") + _integer(num_units) + b"tQ"
    arguments = persistent_id + _integer(0) + _integers(shape) + _integers(strides) + b"\x89ccollections\nOrderedDict\n)R"
    last = b"" if is_typed else b"ctorch\n" + kind.encode() + b"\n"
    return b"\x80\x02ctorch._utils\n" + rebuild + b"\n(" + arguments + last + b"tR."


def _text(text: str) -> bytes:
    return b"X" + pack("<I", len(text)) + text.encode()


def _integer(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + pack("<i", value)
    return b"\x8a\x08" + pack("<q", value)


def _integers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"


def _data_header(crc: int, num_bytes: int) -> bytes:
    """Return the local header of the tensor, padded up to where its values start."""
    sizes = pack("<HHQQ", 1, 16, num_bytes, num_bytes)
    name = b"data/0"
    num_padding = DATA_START - 30 - len(ARCHIVE) - 1 - len(name) - len(sizes) - 4
    return _local_header(name, crc, LARGE, LARGE, sizes + b"FB" + pack("<H", num_padding) + b"Z" * num_padding)


def _local_header(name: bytes, crc: int, packed: int, unpacked: int, extra: bytes) -> bytes:
    name = ARCHIVE + b"/" + name
    fields = pack("<4sHHHHHIIIHH", b"PK\x03\x04", VERSION_NEEDED, 0, 0, 0, DOS_DATE, crc, packed, unpacked, len(name), len(extra))
    return fields + name + extra


def _directory_entry(name: bytes, crc: int, num_bytes: int, start: int) -> bytes:
    name = ARCHIVE + b"/" + name
    large = b"".join(pack("<Q", value) for value in (*(2 * (num_bytes,)), start) if value >= LARGE)
    extra = pack("<HH", 1, len(large)) + large if large else b""
    size, offset = min(num_bytes, LARGE), min(start, LARGE)
    made_by, needed = VERSION_NEEDED, VERSION_NEEDED
    sizes = pack("<III", crc, size, size)
    fields = pack("<4sHHHHHH", b"PK\x01\x02", made_by, needed, 0, 0, 0, DOS_DATE) + sizes
    return fields + pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, offset) + name + extra


def _directory(entries: list[bytes], start: int) -> bytes:
    body = b"".join(entries)
    end = pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(entries), len(entries), len(body), min(start, LARGE), 0)
    if start < LARGE:
        return body + end
    counts = pack("<QQ", len(entries), len(entries))
    end64 = pack("<4sQHHII", b"PK\x06\x06", 44, VERSION_NEEDED, VERSION_NEEDED, 0, 0) + counts + pack("<QQ", len(body), start)
    locator = pack("<4sIQI", b"PK\x06\x07", 0, start + len(body), 1)
    return body + end64 + locator + end
