from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioloader.errors import ConfigError, SourceError
from aioloader.testing.leaks import resources
from aioloader.tokens.metadata import Metadata, Part, file_facts, write_metadata
from aioloader.tokens.reading import TokenFile, TokenRows
from tests.tokens.token_cases import target, write_tokens

ROWS = np.arange(60).reshape(12, 5)


def write_rows(directory: Path, format: str, *, has_metadata: bool = True) -> Path:
    path = target(directory, format)
    written = write_tokens(format, path, ROWS, seq_len=5, ends=[13, 60])
    if has_metadata:
        parts = (Part.of(path.name, written),)
        write_metadata(path, Metadata(format=format, dtype="uint16", seq_len=5, parts=parts, files=file_facts(directory, written.files)))
    return path


@pytest.mark.parametrize("format", ["npy", "pt", "bin"])
def test_rows_are_a_table(tmp_path: Path, format: str) -> None:
    # C035: stateless look-up by index, in any order
    rows = TokenRows(write_rows(tmp_path, format))
    assert (len(rows), rows.seq_len) == (12, 5)
    for index in (5, 0, np.int64(11), -1, -12, np.uint8(5), 5):
        assert rows[index].dtype == np.int64
        assert rows[index].tolist() == ROWS[int(index)].tolist()
    assert rows.take([3, -1, 3]).tolist() == ROWS[[3, -1, 3]].tolist()
    assert rows.take([]).shape == (0, 5)
    rows[5][:] = 0  # a copy
    assert rows[5].tolist() == ROWS[5].tolist()


@pytest.mark.parametrize("index", [12, -13])
def test_refuses_a_row_out_of_range(tmp_path: Path, index: int) -> None:
    rows = TokenRows(write_rows(tmp_path, "npy"))
    with pytest.raises(IndexError, match=rf"TokenRows\(.*tokens\.npy.*expected an index from -12 to 11, got {index}; it has 12 entries"):
        rows[index]
    with pytest.raises(IndexError, match=f"got {index}"):
        rows.take([0, index])
    with pytest.raises(TypeError, match="float"):
        rows[1.0]  # type: ignore[index]


def test_nothing_is_open_before_the_first_use_and_after_close(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "bin")
    before = resources()
    rows = TokenRows(path)
    assert resources().since(before).count == 0
    assert rows[0].size == 5
    assert resources().since(before).count > 0
    sent = pickle.dumps(rows)
    assert len(sent) < 400
    rows.close()
    assert resources().since(before).count == 0
    assert pickle.loads(sent)[2].tolist() == ROWS[2].tolist()


def test_a_raw_file_needs_its_type_and_row_length_from_somebody(tmp_path: Path) -> None:
    path = tmp_path / "raw.bin"
    path.write_bytes(np.arange(13, dtype="<u2").tobytes())
    with pytest.raises(ConfigError, match=r"raw\.bin: expected raw\.idx or metadata\.json beside it, got neither; .* or give dtype"):
        TokenRows(path, seq_len=5)
    with pytest.raises(ConfigError, match=r"raw\.bin \(seq_len\): expected the tokens in a row, got None"):
        TokenRows(path, dtype="uint16")
    with pytest.raises(ConfigError, match=r"raw\.bin: expected whole tokens of uint32, got 26 bytes"):
        TokenRows(path, dtype="uint32", seq_len=5)
    rows = TokenRows(path, dtype="uint16", seq_len=5)
    assert rows.take(range(len(rows))).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert pickle.loads(pickle.dumps(rows))[1].tolist() == [5, 6, 7, 8, 9]


def test_the_index_says_the_type_and_the_metadata_the_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "bin", has_metadata=False)
    assert len(TokenRows(path, seq_len=4)) == 15
    write_rows(tmp_path, "bin")
    path.with_suffix(".idx").unlink()
    assert TokenRows(path)[1].tolist() == ROWS[1].tolist()


@pytest.mark.parametrize("format", ["npy", "bin"])
def test_refuses_another_row_length_than_the_data_have(tmp_path: Path, format: str) -> None:
    path = write_rows(tmp_path, format)
    with pytest.raises(ConfigError, match=rf"tokens\.{format} \(seq_len\): expected 5, the length of its rows, got 6; leave it out"):
        TokenRows(path, seq_len=6)
    with pytest.raises(ConfigError, match="seq_len: expected an int of at least 1, got 0"):
        TokenRows(path, seq_len=0)


def save(path: Path, array: Any) -> None:
    if path.suffix == ".pt":
        torch.save(torch.as_tensor(array), path)
    else:
        np.save(path, array)


@pytest.mark.parametrize("name", ["a.npy", "a.pt"])
@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.arange(6), r"expected tokens of shape \[rows, seq_len\], got shape \[6\]; use MMapTokens"),
        (np.zeros((2, 2, 2), int), r"got shape \[2, 2, 2\]"),
        (
            np.zeros((2, 3)),
            "expected (integer tokens|one contiguous tensor of integers), got (values of float64|a tensor of DoubleStorage)",
        ),
        (np.zeros((2, 3), bool), "got (values of bool|a tensor of BoolStorage)"),
    ],
)
def test_refuses_what_has_no_rows_of_integers(tmp_path: Path, name: str, array: Any, message: str) -> None:
    # C033: 1-D or float file -> ValueError
    save(tmp_path / name, array)
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        TokenRows(tmp_path / name)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def overwrite_magic(path: Path) -> None:
    path.write_bytes(b"something" + path.read_bytes()[9:])


@pytest.mark.parametrize(
    ("format", "damage", "message"),
    [
        ("npy", cut, r"expected 248 bytes for uint16\[12, 5\], got 247; it was cut short"),
        ("npy", overwrite_magic, r"expected a \.npy file"),
        ("pt", cut, r"expected an archive of torch\.save"),
        ("bin", cut, "expected 120 bytes as tokens.idx says, got 119"),
    ],
)
def test_refuses_a_damaged_file_at_once(tmp_path: Path, format: str, damage: Callable[[Path], None], message: str) -> None:
    path = write_rows(tmp_path, format)
    damage(path)
    with pytest.raises(SourceError, match=rf"tokens\.{format}: {message}"):
        TokenRows(path)


def test_a_file_that_is_cut_later_is_noticed_before_it_is_mapped(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "npy")
    rows = TokenRows(path)
    cut(path)
    with pytest.raises(SourceError, match=r"tokens\.npy: expected 248 bytes"):
        rows[0]


@pytest.mark.parametrize(
    ("name", "message"), [("a.npy", "got no such file"), ("a.csv", "got the suffix '.csv'"), ("", "expected a token file, got a directory")]
)
def test_refuses_what_is_no_token_file(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(ConfigError, match=message):
        TokenFile(tmp_path / name)


def test_a_file_of_no_row(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((0, 5), np.int32))
    rows = TokenRows(tmp_path / "a.npy")
    assert (len(rows), rows.seq_len, list(rows.take([]))) == (0, 5, [])


def test_big_endian_tokens_are_read_right(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ROWS.astype(">i4"))
    assert TokenRows(tmp_path / "a.npy")[3].tolist() == ROWS[3].tolist()


READ_ALL = """
import sys
from aioloader.tokens.reading import TokenRows
rows = TokenRows(sys.argv[1])
assert rows.take(range(len(rows))).sum() >= 0
entry = open("/proc/self/smaps").read().partition(sys.argv[1])[2]
sizes = dict(line.split(":") for line in entry.splitlines()[1:22] if line.endswith("kB"))
kb = {name: int(size.split()[0]) for name, size in sizes.items()}
print(kb["Shared_Clean"] + kb["Shared_Dirty"], kb["Private_Clean"] + kb["Private_Dirty"], "torch" in sys.modules)
"""


def test_processes_share_the_pages(tmp_path: Path) -> None:
    # C011, and C009: no torch is needed to read
    path = tmp_path / "a.npy"
    np.save(path, np.ones((512, 4096), np.uint16))
    rows = TokenRows(path)
    assert rows.take(range(512)).sum() == 512 * 4096  # mapped and touched here
    done = subprocess.run([sys.executable, "-c", READ_ALL, str(path)], check=True, capture_output=True, text=True)
    shared_kb, own_kb, has_torch = done.stdout.split()
    assert int(shared_kb) > 0.9 * 4096
    assert (own_kb, has_torch) == ("0", "False")


@pytest.mark.parametrize("format", ["npy", "pt", "bin"])
def test_a_relative_path_is_that_of_the_directory_it_was_given_in(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path, format)
    monkeypatch.chdir(tmp_path)
    rows = TokenRows(path.name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for one in (rows, pickle.loads(pickle.dumps(rows))):
        assert one[3].tolist() == ROWS[3].tolist()
        assert one.fingerprint() == TokenRows(path).fingerprint()


def test_a_file_that_is_replaced_before_it_is_read_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "npy", has_metadata=False)
    late, early = TokenRows(path), TokenRows(path)
    assert early[0].tolist() == ROWS[0].tolist()
    write_tokens("npy", tmp_path / "new.npy", np.arange(100, 190), seq_len=10)
    (tmp_path / "new.npy").replace(path)
    with pytest.raises(SourceError, match=r"tokens\.npy: expected the file that was opened, got one that was written since; open it again"):
        late[0]
    assert early[0].tolist() == ROWS[0].tolist(), "what is mapped stays"


def test_what_a_header_cannot_mean_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "npy", has_metadata=False)
    path.write_bytes(path.read_bytes().replace(b"(12, 5)", b"(-2, 5)"))
    with pytest.raises(SourceError, match=r"expected a shape, got \[-2, 5\]"):
        TokenRows(path)
    with pytest.raises(ConfigError, match=r"raw\.bin \(dtype\): expected an integer dtype, got 'words'"):
        TokenFile(write_raw(tmp_path), dtype="words")


def write_raw(directory: Path) -> Path:
    (directory / "raw.bin").write_bytes(bytes(8))
    return directory / "raw.bin"
