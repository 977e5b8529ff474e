"""The integer type of tokens on disk, and the check that every token fits it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aioloader.errors import ConfigError

__all__ = ["Tokens", "check_tokens", "stored_dtype", "token_dtype"]

Tokens = npt.NDArray[Any]
"""An array of integers."""

MAX_VOCABULARY = {"uint16": 1 << 16, "uint32": 1 << 32, "int32": 1 << 31}

DO = "give the tokenizer that the vocabulary size belongs to, or a larger vocabulary size and dtype"


def token_dtype(vocab_size: int, format: str | None = None) -> np.dtype[Any]:
    """Return the narrowest type for ids below `vocab_size`: uint16 up to 65,536, else uint32 (int32 for "bin", whose index has no uint32).

    Raises:
        ConfigError: `vocab_size` is not positive, or larger than the type can hold.
    """
    wide = "int32" if format == "bin" else "uint32"
    if type(vocab_size) is not int or not 0 < vocab_size <= MAX_VOCABULARY[wide]:
        raise ConfigError(
            "vocab_size",
            expected=f"an int from 1 to {MAX_VOCABULARY[wide]:,} ({wide})",
            got=repr(vocab_size),
            do="use len(tokenizer), added tokens included",
        )
    return np.dtype("uint16" if vocab_size <= MAX_VOCABULARY["uint16"] else wide)


def check_tokens(array: Tokens, dtype: npt.DTypeLike, where: str, *, vocab_size: int | None = None) -> Tokens:
    """Return `array` as `dtype`, after checking that no token is negative, too large for it, or at or above `vocab_size`.

    Args:
        array: Integers of any shape.
        dtype: The type on disk.
        where: Names the document in the error, such as "document 17 of a.jsonl".
        vocab_size: The size of the vocabulary; without it only the type limits the ids.

    Raises:
        ConfigError: A token does not fit, or these are not integers.
    """
    array, dtype = np.asarray(array), np.dtype(dtype)
    if array.dtype.kind not in "iu":
        if array.size:
            raise ConfigError(where, expected="integer tokens", got=f"an array of {array.dtype}", do="pass token ids")
        return array.astype(dtype)
    limit = int(np.iinfo(dtype).max) if vocab_size is None else min(vocab_size - 1, int(np.iinfo(dtype).max))
    if array.size and (array.min() < 0 or array.max() > limit):
        raise _misfit(array, dtype, where, limit, vocab_size)
    return array.astype(dtype, copy=False)


def stored_dtype(where: str, dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return `dtype` in little-endian order.

    Raises:
        ConfigError: It is not an integer type.
    """
    try:
        stored = np.dtype(dtype).newbyteorder("<")
    except (TypeError, ValueError):
        stored = None
    if stored is None or stored.kind not in "iu":
        got = repr(dtype) if stored is None else stored.name
        raise ConfigError(where, expected="an integer dtype", got=got, do="use token_dtype(vocab_size)")
    return stored


def _misfit(array: Tokens, dtype: np.dtype[Any], where: str, limit: int, vocab_size: int | None) -> ConfigError:
    flat = array.reshape(-1)
    first = int(np.flatnonzero((flat < 0) | (flat > limit))[0])
    vocabulary = "" if vocab_size is None else f", vocabulary of {vocab_size}"
    return ConfigError(
        where, expected=f"token ids from 0 to {limit} ({dtype.name}{vocabulary})", got=f"{int(flat[first])} at token {first}", do=DO
    )
