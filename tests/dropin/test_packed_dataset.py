from __future__ import annotations

import os
import pickle
import timeit
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, StackDataset

from aioloader import FixedBatch, Loader, PretrainCollator
from aioloader.dropin.mmap_tokens import MMapTokens
from aioloader.dropin.packed_dataset import PackedDataset
from aioloader.errors import ConfigError, SourceError
from aioloader.tokens.metadata import Metadata, Part, write_metadata
from aioloader.tokens.npy import NPY_HEADER_BYTES, npy_header
from aioloader.tokens.torch_zip import DATA_START, TorchZipLayout
from tests.tokens.token_cases import write_tokens

ROWS = np.arange(60).reshape(12, 5)


def packed(directory: Path, format: str = "pt", dtype: str = "int64") -> Path:
    path = directory / f"packed.{format}"
    write_tokens(format, path, ROWS, dtype=dtype, seq_len=5)
    return path


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("format", ["pt", "npy", "bin"])
def test_rows_are_tensors_by_index(tmp_path: Path, format: str) -> None:
    dataset = PackedDataset(packed(tmp_path, format), seq_len=5)
    assert (len(dataset), dataset.seq_len, dataset.num_tokens) == (12, 5, 60)
    for index in (5, 2, np.int64(3), -1, torch.tensor(4), 5):
        row = dataset[index]
        assert list(row) == ["input_ids"]
        assert row["input_ids"].dtype == torch.int64
        assert row["input_ids"].tolist() == ROWS[int(index)].tolist()
    rows = dataset.__getitems__([7, 0, -2])
    assert [row["input_ids"].tolist() for row in rows] == ROWS[[7, 0, -2]].tolist()


def test_reads_what_torch_saved(tmp_path: Path) -> None:
    torch.save(torch.from_numpy(ROWS), tmp_path / "packed_4k.pt")
    assert torch.equal(PackedDataset(tmp_path / "packed_4k.pt")[3]["input_ids"], torch.from_numpy(ROWS[3]))


def test_a_changed_row_changes_neither_the_data_nor_the_next_look_up(tmp_path: Path) -> None:
    dataset = PackedDataset(packed(tmp_path))
    dataset[3]["input_ids"].zero_()
    dataset.__getitems__([3])[0]["input_ids"].zero_()
    assert dataset[3]["input_ids"].tolist() == ROWS[3].tolist()


def test_refuses_a_stream_and_floats(tmp_path: Path) -> None:
    # C033: 1-D or float file -> ValueError
    torch.save(torch.arange(10), tmp_path / "flat.pt")
    with pytest.raises(ValueError, match=r"flat\.pt: expected tokens of shape \[rows, seq_len\], got shape \[10\]; use MMapTokens"):
        PackedDataset(tmp_path / "flat.pt")
    torch.save(torch.zeros(2, 3), tmp_path / "floats.pt")
    with pytest.raises(ValueError, match=r"floats\.pt: expected one contiguous tensor of integers, got a tensor of FloatStorage"):
        PackedDataset(tmp_path / "floats.pt")
    with pytest.raises(ConfigError, match=r"none\.pt: expected a token file, got no such file"):
        PackedDataset(tmp_path / "none.pt")
    (tmp_path / "cut.npy").write_bytes(npy_header(np.dtype("<u2"), (3, 5)))
    with pytest.raises(SourceError, match=r"cut\.npy: expected 158 bytes for uint16\[3, 5\], got 128"):
        PackedDataset(tmp_path / "cut.npy")


def test_a_look_up_takes_less_than_20_microseconds(tmp_path: Path) -> None:
    # C036; the best of many, since other processes share the machine
    write_tokens("npy", tmp_path / "packed.npy", np.ones((64, 4096), int), seq_len=4096)
    dataset = PackedDataset(tmp_path / "packed.npy")
    best_s = min(timeit.repeat(lambda: dataset[7], number=100, repeat=50)) / 100
    assert best_s < 20e-6
    dataset.close()


@pytest.mark.parametrize("format", ["npy", "pt"])
def test_opening_2_gb_takes_no_memory(tmp_path: Path, format: str) -> None:
    # C011: < 50 MB; D007: flat
    path, num_tokens = tmp_path / f"large.{format}", 1 << 30
    path.touch()
    os.truncate(path, (NPY_HEADER_BYTES if format == "npy" else DATA_START) + 2 * num_tokens)  # sparse
    if format == "npy":
        with open(path, "r+b") as file:
            file.write(npy_header(np.dtype("<u2"), (num_tokens // 4096, 4096)))
    else:
        layout = TorchZipLayout(path, np.dtype("<u2"), 4096, num_tokens, 0)
        layout.finish(num_tokens)
        layout.release()
    before = rss_bytes()
    dataset = PackedDataset(path)
    rows = [dataset[index]["input_ids"] for index in (0, len(dataset) // 2, -1)]
    assert rss_bytes() - before < 50e6
    assert [row.shape for row in rows] == [(4096,)] * 3
    dataset.close()
    path.unlink()


def test_is_sent_as_its_path(tmp_path: Path) -> None:
    dataset = PackedDataset(packed(tmp_path))
    assert dataset[0]["input_ids"].tolist() == ROWS[0].tolist()
    sent = pickle.dumps(dataset)
    assert len(sent) < 500
    copy = pickle.loads(sent)
    assert copy[3]["input_ids"].tolist() == ROWS[3].tolist()


def test_in_torchs_loader_with_forked_workers(tmp_path: Path) -> None:
    dataset = PackedDataset(packed(tmp_path))
    assert dataset[0]["input_ids"].tolist() == ROWS[0].tolist()  # mapped before the workers are forked
    loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
    batches = [batch["input_ids"] for batch in loader]
    assert [batch.shape for batch in batches] == [(4, 5)] * 3
    assert torch.cat(batches).tolist() == ROWS.tolist()


@pytest.fixture(scope="module")
def resource_tracker() -> None:
    """Start the process that the standard library keeps from the first spawned one on."""
    ensure_running()


@pytest.mark.timeout(90)  # two interpreters import torch
def test_in_torchs_loader_with_spawned_workers(tmp_path: Path, resource_tracker: None) -> None:
    write_tokens("bin", tmp_path / "flat.bin", np.arange(100, 161))
    packed_rows, windows = PackedDataset(packed(tmp_path)), MMapTokens(tmp_path / "flat.bin", 5, return_labels=True)
    assert packed_rows[0]["input_ids"].tolist() == ROWS[0].tolist()
    both: StackDataset[Any] = StackDataset(packed_rows, windows)
    loader: DataLoader[Any] = DataLoader(both, batch_size=4, num_workers=2, multiprocessing_context="spawn")
    batches = list(loader)
    assert torch.cat([rows["input_ids"] for rows, _ in batches]).tolist() == ROWS.tolist()
    assert torch.cat([window["labels"] for _, window in batches]).reshape(-1).tolist() == list(range(101, 161))


@pytest.mark.timeout(90)  # three processes import torch
def test_is_a_source_of_a_loader_with_worker_processes(tmp_path: Path) -> None:
    # C018: the collator stacks to [batch, seq_len] and adds labels
    loader = Loader(PackedDataset(packed(tmp_path)), batch=FixedBatch(3), collate=PretrainCollator(), workers=2)
    with loader:
        batches = list(loader)
    assert torch.cat([batch["input_ids"] for batch in batches]).tolist() == ROWS.tolist()
    assert torch.cat([batch["labels"] for batch in batches])[:, 1:].tolist() == ROWS[:, 1:].tolist()


@pytest.mark.parametrize(
    ("eos", "pad", "expected"),
    [
        (0, 0, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]),
        (0, 9, [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        (None, 0, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]),
    ],
    ids=["padding is the end of a document", "a token of its own", "documents have no end"],
)
def test_what_fills_rows_up_is_no_target(tmp_path: Path, eos: int | None, pad: int, expected: list[list[int]]) -> None:
    rows = np.array([[5, 0, 6, 0, 0], [5, 0, 6, 7, 0], [4, 0, 0, 0, 0], [1, 2, 0, 9, 9]])
    write_tokens("npy", tmp_path / "tokens.npy", rows, seq_len=5)
    assert list(PackedDataset(tmp_path / "tokens.npy")[0]) == ["input_ids"], "nobody says what it is"
    (tmp_path / "metadata.json").write_text('{"made_by": "another program"}')
    assert list(PackedDataset(tmp_path / "tokens.npy")[0]) == ["input_ids"]
    part = Part(name="tokens.npy", num_tokens=20, num_rows=4, num_documents=9, dropped_tail=0)
    details = {"padding_id": pad, "padding_tokens": 3}
    write_metadata(tmp_path, Metadata(format="npy", dtype="uint16", seq_len=5, parts=(part,), files={}, eos_id=eos, details=details))
    dataset = pickle.loads(pickle.dumps(PackedDataset(tmp_path / "tokens.npy")))
    assert [dataset[index]["loss_mask"].long().tolist() for index in range(4)] == expected
    assert [row["loss_mask"].long().tolist() for row in dataset.__getitems__([2, 0])] == [expected[2], expected[0]]
    labels = PretrainCollator()([dataset[index] for index in range(4)])["labels"]
    assert (labels[:, 1:] != -100).tolist() == (np.array(expected)[:, 1:] == 1).tolist()
