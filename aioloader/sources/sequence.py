"""A source made of anything with a length and an index: lists, arrays, map-style datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from aioloader.errors import ConfigError
from aioloader.protocols import Cursor, Json, Record
from aioloader.sources.indexed import IndexedReader
from aioloader.sources.origin import describe

__all__ = ["Indexable", "SequenceSource"]

SLICED_TYPES = (list, tuple, range)


class Indexable(Protocol):
    """What `SequenceSource` reads."""

    def __len__(self) -> int:
        """Return the number of records."""

    def __getitem__(self, index: Any, /) -> Record:
        """Return the record at an index from 0 to len - 1."""


class SequenceSource:
    """The records of an indexed object by rising index; record ids are (name, index). Resuming reads nothing.

    An object with `__getitems__`, the batched protocol of torch's map-style datasets, is asked for many records at once.

    Args:
        sequence: Anything with `__len__` and `__getitem__`, not changed while it is read.
        name: The shard part of the record ids.

    Raises:
        ConfigError: `sequence` is something else, or text or a mapping.
    """

    def __init__(self, sequence: Indexable, name: str = "sequence") -> None:
        is_indexed = hasattr(type(sequence), "__len__") and hasattr(type(sequence), "__getitem__")
        if not is_indexed or isinstance(sequence, (str, bytes, bytearray, Mapping)):
            raise ConfigError(
                "SequenceSource",
                expected="an object with __len__ and __getitem__ by index",
                got=describe(sequence),
                do="pass a list, an array or a map-style dataset; for anything that is only iterable use IterableSource",
            )
        self._sequence = sequence
        self._name = name
        self._num_records = len(sequence)

    def __repr__(self) -> str:
        return f"SequenceSource({describe(self._sequence)}, name={self._name!r})"

    @property
    def num_records(self) -> int:
        """Return the number of records of one pass."""
        return self._num_records

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the name, the type and the number of records."""
        return {"kind": "sequence", "name": self._name, "of": describe(self._sequence), "num_records": self._num_records}

    def open(self, epoch: int, cursor: Cursor | None) -> IndexedReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`.

        Raises:
            ResumeError: The cursor is not an index of this source.
        """
        reader = IndexedReader(self._name, self._num_records, self._sequence.__getitem__, _read_many(self._sequence), cursor)
        set_epoch = getattr(self._sequence, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return reader


def _read_many(sequence: Any) -> Callable[[int, int], Sequence[Record]] | None:
    """Return how to read several records at once, or None where that is not cheaper."""
    if type(sequence) in SLICED_TYPES:
        return lambda first, stop: sequence[first:stop]
    if callable(getattr(sequence, "__getitems__", None)):
        return lambda first, stop: sequence.__getitems__(list(range(first, stop)))
    return None
