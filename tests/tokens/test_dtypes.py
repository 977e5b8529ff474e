from __future__ import annotations

import numpy as np
import pytest

from aioloader.errors import ConfigError
from aioloader.tokens.dtypes import check_tokens, stored_dtype, token_dtype


@pytest.mark.parametrize(
    ("vocab_size", "format", "name"),
    [
        (1, None, "uint16"),
        (65_536, None, "uint16"),
        (65_537, None, "uint32"),
        (1 << 32, "npy", "uint32"),
        (65_536, "bin", "uint16"),
        (65_537, "bin", "int32"),
        (1 << 31, "bin", "int32"),
    ],
)
def test_the_narrowest_type_that_holds_the_vocabulary(vocab_size: int, format: str | None, name: str) -> None:
    assert token_dtype(vocab_size, format) == np.dtype(name)
    assert np.iinfo(name).max >= vocab_size - 1


@pytest.mark.parametrize(
    ("vocab_size", "format"), [(0, None), (-1, None), ((1 << 32) + 1, None), ((1 << 31) + 1, "bin"), (True, None), (2.0, None)]
)
def test_refuses_a_vocabulary_that_no_type_holds(vocab_size: int, format: str | None) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size: expected an int from 1 to .*, got "):
        token_dtype(vocab_size, format)


def test_tokens_that_fit_are_returned_in_the_type_on_disk() -> None:
    checked = check_tokens(np.array([0, 65_535]), "uint16", "document 3")
    assert checked.dtype == np.uint16
    assert checked.tolist() == [0, 65_535]
    assert check_tokens(np.array([], dtype=np.float64), "uint16", "an empty document").dtype == np.uint16


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "message"),
    [
        ([1, 65_536, 7], None, r"document 3 of a\.jsonl: expected token ids from 0 to 65535 \(uint16\), got 65536 at token 1"),
        ([1, 2, -1], None, "got -1 at token 2"),
        ([[5, 6], [50_257, 3]], 50_257, r"from 0 to 50256 \(uint16, vocabulary of 50257\), got 50257 at token 2"),
        ([1 << 40], 1 << 20, "from 0 to 65535 .*got 1099511627776 at token 0"),
    ],
)
def test_a_token_that_does_not_fit_is_named_with_its_document_and_vocabulary(
    tokens: list[int], vocab_size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tokens(np.array(tokens), "uint16", "document 3 of a.jsonl", vocab_size=vocab_size)


def test_an_unsigned_token_too_large_for_a_signed_type_is_found() -> None:
    with pytest.raises(ConfigError, match="got 2147483648 at token 0"):
        check_tokens(np.array([1 << 31], dtype=np.uint32), "int32", "document 0")


def test_refuses_what_is_no_integer() -> None:
    with pytest.raises(ConfigError, match="document 0: expected integer tokens, got an array of float64"):
        check_tokens(np.array([1.5]), "uint16", "document 0")
    with pytest.raises(ConfigError, match="expected an integer dtype, got float32"):
        stored_dtype("open_writer", "float32")


def test_the_type_on_disk_is_little_endian() -> None:
    assert stored_dtype("here", ">i4").str == "<i4"
