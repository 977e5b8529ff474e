from __future__ import annotations

from pathlib import Path
from struct import pack

import numpy as np
import pytest

from aioloader.errors import ConfigError, SourceError
from aioloader.tokens.megatron_index import index_header, read_index_header

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_headers_of_every_type(tmp_path: Path, name: str, code: int) -> None:
    golden = b"MMIDIDX\x00\x00" + pack("<Q", 1) + bytes([code]) + pack("<Q", 2) + pack("<Q", 3)
    assert len(golden) == 34
    assert index_header(np.dtype(name), 2, 2) == golden
    (tmp_path / "a.idx").write_bytes(golden + bytes(12 * 2 + 8 * 3))
    assert read_index_header(tmp_path / "a.idx") == (np.dtype(name), 2, 2)


def test_refuses_a_type_without_a_code() -> None:
    with pytest.raises(ConfigError, match=r"expected uint8, .*, got uint32; use token_dtype\(vocab_size, 'bin'\)"):
        index_header(np.dtype("uint32"), 0, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"TNTIDX\x00\x00" + bytes(60), r"got the unmapped format of 2021 and before; convert it with Megatron's tools"),
        (b"", "got a file that starts with b''"),
        (b"MMIDIDX\x00\x00" + bytes(5), "got a file that starts with b'MMIDIDX"),
        (b"\x93NUMPY" + bytes(60), "got a file that starts with b'.x93NUMPY"),
        (b"MMIDIDX\x00\x00" + pack("<QBQQ", 2, 4, 0, 1) + bytes(8), "got version 2, dtype code 4"),
        (b"MMIDIDX\x00\x00" + pack("<QBQQ", 1, 9, 0, 1) + bytes(8), "got version 1, dtype code 9"),
        (b"MMIDIDX\x00\x00" + pack("<QBQQ", 1, 4, 2, 3) + bytes(47), "got 81 bytes where 2 sequences and 3 document boundaries need 82"),
        (b"MMIDIDX\x00\x00" + pack("<QBQQ", 1, 4, 0, 0), "got 34 bytes where 0 sequences and 0 document boundaries"),
    ],
)
def test_refuses_what_is_no_index(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(SourceError, match=rf"a\.idx: expected a Megatron index \(MMIDIDX, version 1\), {message}"):
        read_index_header(tmp_path / "a.idx")


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.idx: expected a token file, got no such file"):
        read_index_header(tmp_path / "a.idx")
