from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aioloader.errors import ConfigError, SourceError
from aioloader.tokens.npy import NPY_HEADER_BYTES, npy_header, read_npy_extent


@pytest.mark.parametrize("shape", [(0,), (5,), (3, 4), (10**18, 10**9)])
def test_numpy_understands_a_header_of_fixed_length(tmp_path: Path, shape: tuple[int, ...]) -> None:
    header = npy_header(np.dtype("<u2"), shape)
    assert len(header) == NPY_HEADER_BYTES
    assert NPY_HEADER_BYTES % 64 == 0
    (tmp_path / "a.npy").write_bytes(header)
    extent = read_npy_extent(tmp_path / "a.npy")
    assert (extent.offset, extent.dtype, extent.shape) == (NPY_HEADER_BYTES, np.dtype("<u2"), shape)
    with open(tmp_path / "a.npy", "rb") as file:
        assert np.lib.format.read_magic(file) == (1, 0)
        assert np.lib.format.read_array_header_1_0(file) == (shape, False, np.dtype("<u2"))


def test_reads_what_numpy_saved(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6, dtype=">i4").reshape(2, 3))
    extent = read_npy_extent(tmp_path / "a.npy")
    assert (extent.dtype.str, extent.shape) == (">i4", (2, 3))


def test_refuses_objects_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(
        ConfigError, match=r"a\.npy: expected an array of integers in C order, got an array of Python objects, which is a pickle"
    ):
        read_npy_extent(path)
    np.save(path, np.asfortranarray(np.zeros((2, 3))))
    with pytest.raises(ConfigError, match="got an array in column-major order"):
        read_npy_extent(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        b"PK\x03\x04 something else",
        npy_header(np.dtype("u1"), (3,))[:50],
        npy_header(np.dtype("u1"), (3,)).replace(b"}", b"{"),
        npy_header(np.dtype("u1"), (3,)).replace(b"descr':", b"descr' "),
    ],
)
def test_refuses_what_is_no_npy_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(SourceError, match=r"a\.npy: expected a \.npy file, got one with .*; copy it again"):
        read_npy_extent(tmp_path / "a.npy")
