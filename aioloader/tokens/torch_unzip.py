"""Finds the values of the one tensor in a .pt file, without torch and without running what its pickle names."""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from aioloader.errors import ConfigError, SourceError
from aioloader.tokens.extent import Extent
from aioloader.tokens.torch_zip import TORCH_DTYPES

__all__ = ["read_torch_extent"]

MAX_PICKLE_BYTES = 1 << 16
"""The pickle of one tensor is below a KiB."""

STORAGES = {kind: name for name, kind in TORCH_DTYPES.items()}


class _Storage(NamedTuple):
    """What a pickle says of a storage: torch's name of its type, and its entry."""

    kind: str
    key: str


class _Tensor(NamedTuple):
    """What a pickle says of a tensor; `kind` is the name of a storage or a dtype."""

    kind: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _TensorUnpickler(pickle.Unpickler):
    """Understands a tensor and nothing else."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a stand-in for what a tensor is made of."""
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any, /) -> _Storage:
        """Return the storage that a persistent id names."""
        _, kind, key, _, _ = pid
        return _Storage(kind, key)


def read_torch_extent(path: Path) -> Extent:
    """Return where the values of the tensor lie.

    Raises:
        ConfigError: The file holds something else than one contiguous tensor of integers.
        SourceError: It is damaged, or of torch's format before 1.6.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            return _read(path, archive, file)
    except ConfigError:
        raise
    # What zipfile raises where offsets, flags and methods are damaged, too.
    except (zipfile.BadZipFile, KeyError, EOFError, OSError, ValueError, RuntimeError, struct.error, zlib.error) as error:
        raise SourceError(
            f"{path}: expected an archive of torch.save, got {type(error).__name__}: {error}; copy it again, or save it with torch>=1.6."
        ) from error


def _read(path: Path, archive: zipfile.ZipFile, file: BinaryIO) -> Extent:
    names = {name.partition("/")[2]: name for name in archive.namelist()}
    if archive.getinfo(names["data.pkl"]).file_size > MAX_PICKLE_BYTES:
        _refuse(path, f"a pickle of {archive.getinfo(names['data.pkl']).file_size} bytes")
    tensor = _unpickle(path, archive.read(names["data.pkl"]))
    if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
        _refuse(path, "a tensor in big-endian order")
    entry = archive.getinfo(names[f"data/{tensor.key}"])
    if entry.compress_type != zipfile.ZIP_STORED:
        _refuse(path, "a compressed tensor")
    dtype = np.dtype(STORAGES[tensor.kind]).newbyteorder("<")
    return Extent(_values_start(file, entry.header_offset) + tensor.offset * dtype.itemsize, dtype, tensor.shape)


def _unpickle(path: Path, data: bytes) -> _Tensor:
    from io import BytesIO

    try:
        tensor = _TensorUnpickler(BytesIO(data)).load()
    except Exception as error:  # noqa: BLE001 - a hostile pickle may raise anything
        _refuse(path, f"a pickle that asks for {error}", error)
    if not isinstance(tensor, _Tensor):
        _refuse(path, f"a {type(tensor).__name__}")
    if tensor.kind not in STORAGES:
        _refuse(path, f"a tensor of {tensor.kind}")
    contiguous = tuple(int(np.prod(tensor.shape[axis + 1 :], dtype=np.int64)) for axis in range(len(tensor.shape)))
    if tensor.strides != contiguous and 0 not in tensor.shape:
        _refuse(path, f"a tensor of shape {list(tensor.shape)} with strides {list(tensor.strides)}")
    return tensor


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *rest: Any) -> _Tensor:
    """Stand in for `_rebuild_tensor_v2`; version 3 says the type as well, since its storage has none."""
    kind = rest[2] if storage.kind == "UntypedStorage" else storage.kind
    return _Tensor(kind, storage.key, offset, shape, strides)


def _values_start(file: BinaryIO, header_offset: int) -> int:
    """Return where the content of an entry begins: the length of its local header is known only there."""
    file.seek(header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", file.read(4))
    return header_offset + 30 + int(name_length) + int(extra_length)


def _refuse(path: Path, got: str, error: Exception | None = None) -> NoReturn:
    raise ConfigError(
        str(path), expected="one contiguous tensor of integers", got=got, do="save it with torch.save(tensor.contiguous(), path)"
    ) from error
