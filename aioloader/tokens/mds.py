"""The MDS layout of Mosaic's streaming format: shards of fixed-shape rows in one column `tokens`, and `index.json`.

A shard is `uint32 N`, `uint32[N + 1]` absolute offsets, its configuration as JSON, and N rows. The room for offsets is that of a
full shard: what the last one does not need is given to its configuration as trailing spaces, so that rows never move.

Source: Mosaic streaming, mds/writer.py and base/format/base/writer.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np

from aioloader.errors import ConfigError
from aioloader.protocols import Json
from aioloader.runtime.durable import flush_directory
from aioloader.tokens.append_file import AppendFile
from aioloader.tokens.checksums import file_sha256
from aioloader.tokens.dtypes import Tokens

__all__ = ["MDS_INDEX", "SIZE_LIMIT_BYTES", "MdsLayout"]

MDS_INDEX = "index.json"
SIZE_LIMIT_BYTES = 1 << 26
"""Mosaic's default size of a shard."""

COLUMN = "tokens"


class MdsLayout:
    """A directory of shards."""

    def __init__(self, path: Path, dtype: np.dtype[Any], seq_len: int, num_tokens: int | None, size_limit: int = SIZE_LIMIT_BYTES) -> None:
        self._path = path
        self._seq_len = seq_len
        self._row_bytes = seq_len * dtype.itemsize
        self._size_limit = size_limit
        self._config = _config(dtype, seq_len, self._row_bytes, size_limit)
        self._rows_per_shard = (size_limit - 8 - len(json.dumps(self._config))) // (self._row_bytes + 4)
        if self._rows_per_shard < 1 or size_limit >= 1 << 32:
            raise ConfigError(
                "open_writer('mds', size_limit)",
                expected=f"a size between one row ({self._row_bytes} bytes and its header) and 4 GiB",
                got=str(size_limit),
                do="change size_limit",
            )
        num_bytes = (num_tokens or 0) * dtype.itemsize
        self._shard, kept = divmod(num_bytes, self._shard_bytes)
        path.mkdir(parents=True, exist_ok=True)
        self._remove_after(self._shard if num_tokens is not None else -1)
        self._file = self._open(kept or None)

    def write(self, tokens: Tokens) -> None:
        """Append tokens of the flat stream, to as many shards as they need."""
        data = tokens.data.cast("B")
        while data:
            room = self._shard_bytes - self._file.num_data_bytes
            self._file.write(data[:room])
            data = data[room:]
            if self._file.num_data_bytes == self._shard_bytes:
                self._next_shard()

    def sync(self) -> dict[str, int]:
        """Flush to the disk; see `aioloader.tokens.rows.Layout`. Full shards were flushed when they became full."""
        flush_directory(self._path)
        return {self._file.path.name: self._file.sync()}

    def state(self) -> Json:
        """Return the size limit, on which the place of a row depends."""
        return self._size_limit

    def finish(self, num_tokens: int) -> list[Path]:
        """Give the last shard its number of rows, and write the index."""
        num_rows = num_tokens // self._seq_len
        last_rows = num_rows - self._shard * self._rows_per_shard
        if last_rows:
            self._file.replace_header(self._header(last_rows))
            self._file.sync()
        self._file.release()
        if not last_rows:
            self._file.path.unlink()
        shards = [self._path / _basename(shard) for shard in range(self._shard + bool(last_rows))]
        counts = [min(self._rows_per_shard, num_rows - first) for first in range(0, num_rows, self._rows_per_shard)]
        index = {"version": 2, "shards": [self._entry(*shard) for shard in zip(shards, counts, strict=True)]}
        index_file = AppendFile(self._path / MDS_INDEX, json.dumps(index, sort_keys=True).encode())
        index_file.sync()
        index_file.release()
        flush_directory(self._path)
        return [*shards, self._path / MDS_INDEX]

    def release(self) -> None:
        """Close the descriptor."""
        self._file.release()

    @property
    def _shard_bytes(self) -> int:
        return self._rows_per_shard * self._row_bytes

    def _open(self, num_data_bytes: int | None) -> AppendFile:
        return AppendFile(self._path / _basename(self._shard), self._header(self._rows_per_shard), num_data_bytes)

    def _next_shard(self) -> None:
        self._file.sync()
        self._file.release()
        self._shard += 1
        self._file = self._open(None)

    def _header(self, num_rows: int) -> bytes:
        """Return everything before the rows; as long for any number of rows."""
        config = json.dumps(self._config, sort_keys=True).encode()
        length = 4 + 4 * (self._rows_per_shard + 1) + len(config)
        offsets = length + self._row_bytes * np.arange(num_rows + 1)
        start = pack("<I", num_rows) + offsets.astype("<u4").tobytes()
        return start + config.ljust(length - len(start))

    def _entry(self, path: Path, num_rows: int) -> dict[str, Json]:
        hashes = {"sha256": file_sha256(path)}
        raw = {"basename": path.name, "bytes": path.stat().st_size, "hashes": hashes}
        return {**self._config, "raw_data": raw, "samples": num_rows, "zip_data": None}

    def _remove_after(self, shard: int) -> None:
        """Remove the index and the shards that a longer or an older run has left."""
        for path in self._path.glob("shard.*.mds"):
            number = path.name.split(".")[1]
            if number.isdecimal() and int(number) > shard:
                path.unlink()
        (self._path / MDS_INDEX).unlink(missing_ok=True)


def _basename(shard: int) -> str:
    return f"shard.{shard:05d}.mds"


def _config(dtype: np.dtype[Any], seq_len: int, row_bytes: int, size_limit: int) -> dict[str, Json]:
    return {
        "column_encodings": [f"ndarray:{dtype.name}:{seq_len}"],
        "column_names": [COLUMN],
        "column_sizes": [row_bytes],
        "compression": None,
        "format": "mds",
        "hashes": ["sha256"],
        "size_limit": size_limit,
        "version": 2,
    }
