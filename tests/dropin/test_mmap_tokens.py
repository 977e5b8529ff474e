from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from aioloader import FixedBatch, Loader, PretrainCollator
from aioloader.dropin.mmap_tokens import MMapTokens
from aioloader.errors import ConfigError, SourceError
from tests.tokens.token_cases import write_tokens


def stream(directory: Path, num_tokens: int, format: str = "npy", dtype: str = "int32") -> Path:
    path = directory / f"tokens.{format}"
    write_tokens(format, path, np.arange(num_tokens), dtype=dtype, ends=[num_tokens] if num_tokens else [])
    return path


@pytest.mark.parametrize(
    ("num_tokens", "seq_len", "length"), [(4097, 2048, 2), (4096, 2048, 1), (4098, 2048, 2), (2049, 2048, 1), (2048, 2048, 0), (0, 8, 0)]
)
def test_the_number_of_windows(tmp_path: Path, num_tokens: int, seq_len: int, length: int) -> None:
    # D008: (n - 1) // seq_len
    assert len(MMapTokens(stream(tmp_path, num_tokens), seq_len)) == length


@pytest.mark.parametrize("format", ["npy", "pt", "bin"])
def test_windows_and_labels(tmp_path: Path, format: str) -> None:
    # D009: tokens[start : start + seq_len] as long, and the same one token on
    path = stream(tmp_path, 31, format)
    tokens = MMapTokens(path, 10)
    window = tokens[1]
    assert isinstance(window, torch.Tensor)
    assert window.dtype == torch.int64
    assert window.tolist() == list(range(10, 20))
    labelled = MMapTokens(path, 10, return_labels=True)
    for index in (0, np.int64(1), -1):
        row = labelled[index]
        assert isinstance(row, dict)
        start = int(index) % 3 * 10
        assert row["input_ids"].tolist() == list(range(start, start + 10))
        assert row["labels"].tolist() == list(range(start + 1, start + 11))
        row["labels"].fill_(-100)
        assert row["input_ids"].tolist() == list(range(start, start + 10))
    assert (tokens.num_tokens, len(tokens)) == (31, 3)


def test_reads_a_raw_file_of_a_given_type(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(np.arange(9, dtype="<u2").tobytes())
    window = MMapTokens(tmp_path / "raw.bin", 4, dtype="uint16")[1]
    assert isinstance(window, torch.Tensor)
    assert window.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("index", [3, -4])
def test_refuses_a_window_out_of_range(tmp_path: Path, index: int) -> None:
    tokens = MMapTokens(stream(tmp_path, 31), 10)
    with pytest.raises(IndexError, match=rf"MMapTokens\(.*expected an index from -3 to 2, got {index}; it has 3 entries"):
        tokens[index]


def test_refuses_rows_floats_and_wrong_lengths(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((2, 3), np.int32))
    with pytest.raises(ConfigError, match=r"rows\.npy: expected tokens of shape \[tokens\], got shape \[2, 3\]; use PackedDataset"):
        MMapTokens(tmp_path / "rows.npy", 2)
    np.save(tmp_path / "floats.npy", np.zeros(6))
    with pytest.raises(ConfigError, match=r"floats\.npy: expected integer tokens, got values of float64"):
        MMapTokens(tmp_path / "floats.npy", 2)
    np.save(tmp_path / "objects.npy", np.array([1, None]), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"objects\.npy: .*Python objects, which is a pickle"):
        MMapTokens(tmp_path / "objects.npy", 2)
    for seq_len in (0, -1, 2.0, True):
        with pytest.raises(ConfigError, match=rf"MMapTokens\(seq_len\): expected an int of at least 1, got {seq_len}"):
            MMapTokens(stream(tmp_path, 5), seq_len)  # type: ignore[arg-type]
    path = stream(tmp_path, 5)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match=r"tokens\.npy: expected 148 bytes for int32\[5\], got 147; it was cut short"):
        MMapTokens(path, 2)


def test_is_sent_as_its_path(tmp_path: Path) -> None:
    tokens = MMapTokens(stream(tmp_path, 50_001), 10, return_labels=True)
    assert len(tokens) == 5000
    assert isinstance(tokens[7], dict)
    sent = pickle.dumps(tokens)
    assert len(sent) < 600
    row = pickle.loads(sent)[7]
    assert row["labels"].tolist() == list(range(71, 81))


def test_in_torchs_loader_with_forked_workers(tmp_path: Path) -> None:
    tokens = MMapTokens(stream(tmp_path, 121, "bin"), 10)
    loader: DataLoader[Any] = DataLoader(tokens, batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert torch.cat(list(loader)).reshape(-1).tolist() == list(range(120))


def test_is_a_source_of_a_loader(tmp_path: Path) -> None:
    tokens = MMapTokens(stream(tmp_path, 121), 10)
    with Loader(tokens, batch=FixedBatch(3), collate=PretrainCollator(), workers=2, pool="thread", host="thread") as loader:
        batches = [batch["input_ids"] for batch in loader]
    assert torch.cat(batches).reshape(-1).tolist() == list(range(120))
