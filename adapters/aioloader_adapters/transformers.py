"""Tokenizers of `tokenizers` and `transformers`, made ready to travel to the workers of `aioloader preprocess`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioloader.errors import ConfigError

__all__ = ["FastTokenizer", "SlowTokenizer", "open_tokenizer"]

WHERE = "tokenizer"
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
BEGIN_NAMES = ("<|begin_of_text|>", "<s>", "<bos>")
"""What special tokens are called that end or begin a document; looked for only where a tokenizer file does not say what they are."""


@dataclass(frozen=True, slots=True)
class FastTokenizer:
    """A tokenizer of the `tokenizers` library, whole: workers open what was hashed, and need neither files, network nor `transformers`.

    Attributes:
        name: What it was opened by.
        definition: Its JSON.
        vocab_size: One more than the largest token id.
        eos_id: The token that ends a document, if it has one; `bos_id` the one that begins it.
        special_tokens_in_text: Whether text that reads like a special token becomes that token.
    """

    name: str
    definition: str = field(repr=False)
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    special_tokens_in_text: bool

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the definition."""
        return hashlib.sha256(self.definition.encode()).hexdigest()

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text, None if there is none."""
        found: int | None = self._open().token_to_id(token)
        return found

    def start(self) -> Callable[[str], Sequence[int]]:
        """Return a function from text to token ids, without special tokens around them; for one thread."""
        encode_batch = self._open().encode_batch_fast  # does not keep offsets, a quarter faster than `encode`

        def encode(text: str) -> Sequence[int]:
            ids: list[int] = encode_batch([text], add_special_tokens=False)[0].ids
            return ids

        return encode

    def _open(self) -> Any:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time; the processes are the parallelism
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = not self.special_tokens_in_text
        return tokenizer


@dataclass(frozen=True, slots=True)
class SlowTokenizer:
    """A tokenizer in Python, of which each worker opens one by name. Attributes as those of `FastTokenizer`."""

    name: str
    digest: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    special_tokens_in_text: bool

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text, None if there is none."""
        found: int | None = _auto_tokenizer(self.name).get_vocab().get(token)
        return found

    def start(self) -> Callable[[str], Sequence[int]]:
        """Return a function from text to token ids, without special tokens around them; for one thread."""
        encode_text = _auto_tokenizer(self.name).encode
        split = not self.special_tokens_in_text

        def encode(text: str) -> Sequence[int]:
            ids: list[int] = encode_text(text, add_special_tokens=False, split_special_tokens=split, verbose=False)
            return ids

        return encode


def open_tokenizer(name: str, *, special_tokens_in_text: bool = False) -> FastTokenizer | SlowTokenizer:
    """Return the tokenizer in the JSON file `name`, or what `transformers.AutoTokenizer` finds under this path or name.

    Code that comes with a tokenizer is never run (no `trust_remote_code`).

    Raises:
        ConfigError: There is none, it cannot be read, or the library for it is not installed.
    """
    if name.endswith(".json"):
        return _from_file(name, special_tokens_in_text)
    tokenizer = _auto_tokenizer(name)
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    facts: dict[str, Any] = {
        "name": name,
        "vocab_size": max(vocabulary.values(), default=-1) + 1,
        "eos_id": tokenizer.eos_token_id,
        "bos_id": tokenizer.bos_token_id,
        "special_tokens_in_text": special_tokens_in_text,
    }
    if tokenizer.is_fast:
        return FastTokenizer(definition=tokenizer.backend_tokenizer.to_str(), **facts)
    text = json.dumps([type(tokenizer).__qualname__, sorted(vocabulary.items())])
    return SlowTokenizer(digest=hashlib.sha256(text.encode()).hexdigest(), **facts)


def _from_file(name: str, special_tokens_in_text: bool) -> FastTokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise _not_installed("tokenizers") from error
    if not Path(name).is_file():
        raise ConfigError(WHERE, expected="an existing file", got=repr(name), do="check the path; it is relative to the working directory")
    try:
        definition = Path(name).read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(definition)
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            WHERE, expected="a tokenizer.json of the tokenizers library", got=f"{name!r} ({error})", do="save it with Tokenizer.save"
        ) from error
    vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return FastTokenizer(
        name=name,
        definition=tokenizer.to_str(),
        vocab_size=max(vocabulary.values(), default=-1) + 1,
        eos_id=_only_one(vocabulary, END_NAMES),
        bos_id=_only_one(vocabulary, BEGIN_NAMES),
        special_tokens_in_text=special_tokens_in_text,
    )


def _only_one(vocabulary: Mapping[str, int], names: Sequence[str]) -> int | None:
    """Return the id of the one of these names that is in the vocabulary; None where it has none, or several."""
    found = [vocabulary[name] for name in names if name in vocabulary]
    return found[0] if len(found) == 1 else None


def _auto_tokenizer(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _not_installed("transformers") from error
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # all sorts, from OSError to KeyError
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            WHERE,
            expected="a tokenizer.json file, or a path or name that transformers.AutoTokenizer opens without code of its own",
            got=f"{name!r} ({type(error).__name__}: {reason})",
            do="check the name, or save the tokenizer to a directory and give that",
        ) from error


def _not_installed(library: str) -> ConfigError:
    return ConfigError(WHERE, expected=f"the library {library}", got="none", do="pip install 'aioloader[hf]'")
