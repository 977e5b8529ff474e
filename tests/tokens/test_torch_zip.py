from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from aioloader.errors import ConfigError
from aioloader.tokens.torch_unzip import read_torch_extent
from aioloader.tokens.torch_zip import DATA_START, TORCH_DTYPES, TorchZipLayout
from aioloader.tokens.writing import open_writer
from tests.tokens.token_cases import write_tokens


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("seq_len", [None, 5])
def test_torch_loads_every_type_mapped_and_as_a_whole(tmp_path: Path, dtype: str, seq_len: int | None) -> None:
    # C008: torch.load(mmap=True) of what was written without torch
    path = tmp_path / "packed.pt"
    write_tokens("pt", path, np.arange(100), dtype=dtype, seq_len=seq_len)
    for is_mapped in (True, False):
        tensor = torch.load(path, mmap=is_mapped, weights_only=True)
        assert str(tensor.dtype) == f"torch.{dtype}"
        assert tensor.numpy().reshape(-1).tolist() == list(range(100))
        assert tensor.shape == ((100,) if seq_len is None else (20, 5))
        assert tensor.is_contiguous()
    assert torch.load(path, mmap=True, weights_only=True).data_ptr() % 64 == 0


def test_the_archive_is_whole_for_other_readers(tmp_path: Path) -> None:
    write_tokens("pt", tmp_path / "packed.pt", np.arange(100), seq_len=5)
    with zipfile.ZipFile(tmp_path / "packed.pt") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["tokens/data/0", "tokens/data.pkl", "tokens/byteorder", "tokens/version"]
        assert archive.read("tokens/data/0") == np.arange(100, dtype="<u2").tobytes()


def test_the_mapped_tensor_can_be_saved_again_by_torch(tmp_path: Path) -> None:
    write_tokens("pt", tmp_path / "packed.pt", np.arange(100), dtype="int64", seq_len=5)
    torch.save(torch.load(tmp_path / "packed.pt", mmap=True, weights_only=True), tmp_path / "again.pt")
    assert torch.equal(torch.load(tmp_path / "again.pt", weights_only=True), torch.arange(100).reshape(20, 5))


def test_more_than_4_gib_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "large.pt"
    num_tokens = 3 * (1 << 30)
    path.touch()
    with open(path, "r+b") as file:
        file.truncate(DATA_START + 2 * num_tokens)  # sparse
        file.seek(DATA_START + 2 * (num_tokens - 1))
        file.write(b"\x07\x00")
    layout = TorchZipLayout(path, np.dtype("<u2"), 4096, num_tokens, 0)
    layout.finish(num_tokens)
    layout.release()
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert tensor.shape == (num_tokens // 4096, 4096)
    assert int(tensor[-1, -1]) == 7
    extent = read_torch_extent(path)
    assert (extent.offset, extent.shape) == (DATA_START, (num_tokens // 4096, 4096))
    del tensor
    path.unlink()


def test_refuses_a_type_that_torch_has_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected an integer dtype, got bool"):
        open_writer("pt", tmp_path / "packed.pt", dtype="bool", seq_len=None)
