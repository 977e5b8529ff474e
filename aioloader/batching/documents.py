"""Documents: samples whose fields are all per token, measured once and then cut by token offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aioloader.errors import BatchError
from aioloader.protocols import Item

__all__ = ["Document", "as_document"]


@dataclass(slots=True)
class Document:
    """A sample ready for packing: the item it came from, its per-token `fields` and their common `length`."""

    item: Item
    fields: Mapping[str, Any]
    length: int

    def cut(self, start: int, stop: int) -> Mapping[str, Any]:
        """Return the fields of tokens `start` to `stop`: views of arrays, slices of lists; all of them: the sample itself."""
        if start == 0 and stop == self.length:
            return self.fields
        return {name: values[start:stop] for name, values in self.fields.items()}


def as_document(item: Item, field: str, separator: Sequence[int] = ()) -> Document:
    """Return the item as a document whose tokens are in `input_ids`, whatever `field` they came in, ended by the `separator`.

    An empty document stays empty.

    Raises:
        BatchError: The sample is no mapping, lacks `field`, or has a field that is not 1-D or of another length.
    """
    sample = item.sample
    if type(sample) is not dict and not isinstance(sample, Mapping):
        got = type(sample).__name__
        raise _error(item, f"expected a mapping with the 1-D field {field!r}, got {got}; return {{{field!r}: tokens}} from preprocess")
    if field not in sample:
        names = sorted(map(str, sample))
        raise _error(item, f"expected the field {field!r}, got fields {names}; add it in preprocess or set Pack(field=...)")
    length = _length(sample[field])
    if length is None or (len(sample) > 1 and any(_length(values) != length for values in sample.values())):
        found = ", ".join(f"{name!r}: {_describe(values)}" for name, values in sample.items())
        raise _error(item, f"expected 1-D per-token fields of one length, got {found}; align or remove the others in preprocess")
    if field != "input_ids":
        sample = {"input_ids": sample[field], **{name: values for name, values in sample.items() if name not in (field, "input_ids")}}
    if separator and length:
        sample, length = _end_with(separator, sample), length + len(separator)
    return Document(item, sample, length)


def _end_with(separator: Sequence[int], sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with the separator's tokens behind the others, and per token what belongs to them in the other fields.

    A label that is the last token itself says that tokens are targets, so the separator's are its own; any other value is
    repeated: a mask, or a label that is ignored.
    """
    last_token = sample["input_ids"][-1]
    ended = {}
    for name, values in sample.items():
        is_tokens = name == "input_ids" or (name == "labels" and values[-1] == last_token)
        end = list(separator) if is_tokens else [values[-1]] * len(separator)
        ended[name] = [*values, *end] if isinstance(values, list) else np.concatenate([values, end])
    return ended


def _length(values: Any) -> int | None:
    """Return the number of tokens in a 1-D list or array, None for anything else."""
    # The two usual types first: an isinstance of an abstract class costs more than all the rest of a push.
    if type(values) is list:
        return len(values)
    if type(values) is np.ndarray:
        return len(values) if values.ndim == 1 else None
    if isinstance(values, (str, bytes, Mapping)) or getattr(values, "ndim", 1) != 1:
        return None
    return len(values) if hasattr(values, "__len__") and hasattr(values, "__getitem__") else None


def _describe(values: Any) -> str:
    length = _length(values)
    if length is not None:
        return f"{length} tokens"
    shape = getattr(values, "shape", None)
    return type(values).__name__ if shape is None else f"{type(values).__name__} of shape {tuple(shape)}"


def _error(item: Item, message: str) -> BatchError:
    return BatchError(f"Pack: {message}", seq=item.seq, record=item.record)
