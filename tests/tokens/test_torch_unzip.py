from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioloader.errors import ConfigError, SourceError
from aioloader.tokens.extent import map_array
from aioloader.tokens.torch_unzip import read_torch_extent


class Explosive:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.uint64]
)
def test_finds_the_values_of_what_torch_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(120).reshape(8, 15).to(dtype)
    torch.save(tensor, tmp_path / "tensor.pt")
    array = map_array(tmp_path / "tensor.pt", read_torch_extent(tmp_path / "tensor.pt"))
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    assert np.array_equal(array, tensor.numpy())


def test_a_slice_of_a_larger_storage_is_found_where_it_lies(tmp_path: Path) -> None:
    torch.save(torch.arange(100).reshape(10, 10)[3:5], tmp_path / "slice.pt")
    array = map_array(tmp_path / "slice.pt", read_torch_extent(tmp_path / "slice.pt"))
    assert array.tolist() == [list(range(30, 40)), list(range(40, 50))]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"input_ids": torch.zeros(2, 3)}, "got a dict"),
        ([1, 2], "got a list"),
        (torch.zeros(2, 3), "got a tensor of FloatStorage"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "got a tensor of BFloat16Storage"),
        (torch.arange(6).reshape(2, 3).T, r"got a tensor of shape \[3, 2\] with strides \[1, 3\]"),
        (list(range(50_000)), "got a pickle of"),
    ],
)
def test_refuses_what_is_not_one_tensor_of_integers(tmp_path: Path, value: Any, message: str) -> None:
    torch.save(value, tmp_path / "value.pt")
    with pytest.raises(ConfigError, match=rf"value\.pt: expected one contiguous tensor of integers, {message}"):
        read_torch_extent(tmp_path / "value.pt")


def test_a_pickle_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    # contract 10: no pickle in data
    torch.save(Explosive(tmp_path / "exploded"), tmp_path / "value.pt")
    with pytest.raises(ConfigError, match=r"got a pickle that asks for posix\.mkdir"):
        read_torch_extent(tmp_path / "value.pt")
    assert not (tmp_path / "exploded").exists()


def test_refuses_what_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "tensor.pt"
    torch.save(torch.arange(100), path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(SourceError, match=r"tensor\.pt: expected an archive of torch\.save, got BadZipFile"):
        read_torch_extent(path)
    torch.save(torch.arange(100), path, _use_new_zipfile_serialization=False)
    with pytest.raises(SourceError, match=r"BadZipFile: File is not a zip file; copy it again, or save it with torch>=1\.6"):
        read_torch_extent(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other/thing", b"")
    with pytest.raises(SourceError, match=r"expected an archive of torch\.save, got KeyError"):
        read_torch_extent(path)


def test_refuses_a_compressed_tensor(tmp_path: Path) -> None:
    torch.save(torch.arange(100), tmp_path / "tensor.pt")
    with zipfile.ZipFile(tmp_path / "tensor.pt") as archive, zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as small:
        for name in archive.namelist():
            small.writestr(name, archive.read(name))
    with pytest.raises(ConfigError, match="got a compressed tensor"):
        read_torch_extent(tmp_path / "small.pt")
