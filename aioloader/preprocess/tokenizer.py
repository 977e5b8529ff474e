"""The tokenizer, and which tokens begin, end and pad documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from aioloader.errors import ConfigError
from aioloader.preprocess.encoding import EncodeDocument
from aioloader.preprocess.inputs import open_adapter
from aioloader.preprocess.options import PreprocessOptions
from aioloader.protocols import Json
from aioloader.tokens.writing import token_dtype

__all__ = ["DocumentTokenizer", "Tokens", "open_tokens"]


class DocumentTokenizer(Protocol):
    """A tokenizer that can travel to a worker; see `aioloader_adapters.transformers`."""

    @property
    def digest(self) -> str:
        """Return what identifies it, whatever it was opened by."""

    @property
    def vocab_size(self) -> int:
        """Return one more than its largest token id."""

    @property
    def eos_id(self) -> int | None:
        """Return the token that ends a document."""

    @property
    def bos_id(self) -> int | None:
        """Return the token that begins a document."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text."""

    def start(self) -> Callable[[str], Sequence[int]]:
        """Return a function from text to token ids."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """How text becomes tokens.

    Attributes:
        tokenizer: Makes them.
        before: Tokens that begin each document; `after` those that end it.
        pad: The token that fills rows up; None where none are.
        dtype: The type on disk.
    """

    tokenizer: DocumentTokenizer
    before: tuple[int, ...]
    after: tuple[int, ...]
    pad: int | None
    dtype: np.dtype[np.integer]

    def encoding(self, field: str) -> EncodeDocument:
        """Return what a worker calls for each document."""
        return EncodeDocument(
            field=field, dtype=self.dtype.name, vocab_size=self.tokenizer.vocab_size, before=self.before, after=self.after
        )

    def settings(self) -> dict[str, Json]:
        """Return what decides the tokens."""
        return {
            "tokenizer": {"sha256": self.tokenizer.digest, "vocab_size": self.tokenizer.vocab_size},
            "bos": list(self.before),
            "eos": list(self.after),
            "pad": self.pad,
            "dtype": self.dtype.name,
        }


def open_tokens(options: PreprocessOptions) -> Tokens:
    """Return the tokenizer with its tokens and the type that holds them.

    Raises:
        ConfigError: There is no such tokenizer or token, or the type is too narrow for the vocabulary.
    """
    tokenizer: DocumentTokenizer = open_adapter("transformers").open_tokenizer(
        options.tokenizer, special_tokens_in_text=options.special_tokens_in_text
    )
    after = _token("eos", options.eos, tokenizer.eos_id, tokenizer)
    pad = None
    if options.packing == "best_fit":
        pad = _token("pad", options.pad, after, tokenizer)
    before = _token("bos", options.bos, tokenizer.bos_id, tokenizer)
    return Tokens(
        tokenizer=tokenizer,
        before=() if before is None else (before,),
        after=() if after is None else (after,),
        pad=pad,
        dtype=_dtype(options, tokenizer.vocab_size),
    )


def _token(where: str, wanted: str | None, own: int | None, tokenizer: DocumentTokenizer) -> int | None:
    """Return the id of a token: none, the tokenizer's own, or one by its id or text."""
    if wanted is None:
        return None
    number = wanted.removeprefix("id:")
    if number != wanted and number.isdecimal():
        found = int(number) if int(number) < tokenizer.vocab_size else None
    else:
        found = own if wanted == "auto" else tokenizer.token_id(wanted)
    if found is None:
        expected = "a tokenizer that says which token that is" if wanted == "auto" else "a token of the vocabulary, or its id as id:NUMBER"
        do = f"name it with --{where} TOKEN" + ("" if where == "pad" else f", or do without with --no-{where}")
        raise ConfigError(where, expected=expected, got="none" if wanted == "auto" else repr(wanted), do=do)
    return found


def _dtype(options: PreprocessOptions, vocab_size: int) -> np.dtype[np.integer]:
    if options.dtype == "auto":
        return token_dtype(vocab_size, options.format)
    dtype = np.dtype(options.dtype)
    if vocab_size - 1 > np.iinfo(dtype).max:
        raise ConfigError(
            "dtype",
            expected=f"a type that holds the {vocab_size:,} tokens of the vocabulary",
            got=f"{dtype.name}, up to {np.iinfo(dtype).max:,}",
            do="use a wider one, or 'auto'",
        )
    return dtype
