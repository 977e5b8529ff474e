"""What a worker does: a record's text to the token ids of one document."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aioloader.protocols import Json, Record
from aioloader.tokens.dtypes import Tokens, check_tokens

__all__ = ["EncodeDocument"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeDocument:
    """Makes `{"input_ids": dtype[num_tokens]}` of a record: the text's tokens between those that begin and end a document.

    Attributes:
        field: The field that holds the text.
        dtype: Name of the type of the tokens.
        vocab_size: Every token must be below it.
        before: Tokens that begin each document.
        after: Tokens that end each document.
    """

    field: str
    dtype: str
    vocab_size: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def __call__(self, record: Record, encode: Callable[[str], Sequence[int]]) -> dict[str, Tokens]:
        """Return the document of one record: a mapping, or a line of JSON as bytes.

        Raises:
            ValueError: It has no text, or the text is none.
        """
        tokens = _array([*self.before, *encode(self._text(record)), *self.after])
        return {"input_ids": check_tokens(tokens, self.dtype, "document", vocab_size=self.vocab_size)}

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the settings."""
        names = ("field", "dtype", "vocab_size")
        return {**{name: getattr(self, name) for name in names}, "before": list(self.before), "after": list(self.after)}

    def _text(self, record: Record) -> str:
        if isinstance(record, bytes):
            try:
                record = json.loads(str(record, "utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"expected a JSON object, got {error.msg} at column {error.colno}") from error
        if not isinstance(record, Mapping):
            raise ValueError(f"expected a JSON object, got a {type(record).__name__}")
        text: Any = record.get(self.field)
        if not isinstance(text, str):
            got = f"a {type(text).__name__}" if self.field in record else f"fields {', '.join(map(repr, sorted(record)))}"
            raise ValueError(f"expected text in the field {self.field!r}, got {got}")
        if not text.isascii():
            text.encode()  # bytes of a file that are not UTF-8, or half of a surrogate pair: fails, and says where
        return text


def _array(ids: list[int]) -> Tokens:
    """Return the ids as integers: an `array` takes a third of the time that NumPy needs for a list."""
    try:
        return np.frombuffer(array("I", ids), dtype=np.uintc)
    except OverflowError:  # an id that fits no type of tokens; the check says which
        return np.array(ids, dtype=np.int64)
