from __future__ import annotations

from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pytest

from aioloader.errors import ConfigError
from aioloader.tokens import megatron_writing
from aioloader.tokens.megatron import MegatronTokens
from aioloader.tokens.megatron_writing import LengthLog
from tests.tokens.token_cases import write_tokens

# Three documents, of 2, 1 and 3 tokens of uint16, laid out by hand.
BIN = b"\x05\x00\x06\x00\x07\x00\x08\x00\x09\x00\x0a\x00"
IDX = (
    b"MMIDIDX\x00\x00"
    + b"\x01\x00\x00\x00\x00\x00\x00\x00\x08"
    + pack("<QQ", 3, 4)
    + pack("<iii", 2, 1, 3)
    + pack("<qqq", 0, 4, 6)
    + pack("<qqqq", 0, 1, 2, 3)
)


def test_the_bytes_of_the_format(tmp_path: Path) -> None:
    write_tokens("bin", tmp_path / "a.bin", [5, 6, 7, 8, 9, 10], ends=[2, 3, 6])
    assert (tmp_path / "a.bin").read_bytes() == BIN
    assert (tmp_path / "a.idx").read_bytes() == IDX


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_type_comes_back(tmp_path: Path, dtype: str) -> None:
    write_tokens("bin", tmp_path / "a.bin", np.arange(100), dtype=dtype, ends=[30, 100])
    data = MegatronTokens(tmp_path / "a.bin")
    assert data.dtype == np.dtype(dtype)
    assert [data[0].tolist(), data[1].tolist()] == [list(range(30)), list(range(30, 100))]


def test_the_index_is_computed_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_writing, "BLOCK", 4)
    lengths = [3, 1, 2, 5, 1, 1, 4, 2, 6]
    write_tokens("bin", tmp_path / "a.bin", np.arange(sum(lengths)), ends=np.cumsum(lengths))
    data = MegatronTokens(tmp_path / "a.bin")
    assert [data.length(place) for place in range(len(data))] == lengths
    assert np.concatenate([data[place] for place in range(len(data))]).tolist() == list(range(sum(lengths)))
    assert data.num_documents == len(lengths)


def test_refuses_a_document_that_the_index_cannot_count(tmp_path: Path) -> None:
    log: Any = LengthLog(tmp_path / "a.idx", np.dtype("<u2"), None, 0)
    with pytest.raises(ConfigError, match=r"a\.idx: append: expected documents of at most 2147483647 tokens, got one of 2147483648"):
        log.append(np.array([1, 1 + (1 << 31)]))
    log.release()
