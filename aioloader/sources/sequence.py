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

    An object with `fingerprint()`, a dict of JSON, is told by it from others of its type and length: a state fits one of them only.
    One with `__getitems__`, the batched protocol of torch's map-style datasets, is asked for many records at once.

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
        """Return the name, the type and the number of records, and the object's own `fingerprint()` where it has one."""
        own = getattr(self._sequence, "fingerprint", None)
        data = {"data": dict(own())} if callable(own) else {}
        return {"kind": "sequence", "name": self._name, "of": describe(self._sequence), "num_records": self._num_records, **data}

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Return the number of records; all are in one shard."""
        return (self._num_records,)

    def shard_name(self, shard: int) -> str:
        """Return the source's name."""
        return self._name

    @property
    def fetches_many(self) -> bool:
        """Return whether the object has a way to give many records at once."""
        return type(self._sequence) in SLICED_TYPES or self._get_many is not None

    def start_epoch(self, epoch: int) -> None:
        """Pass the epoch on to an object that has `set_epoch`."""
        set_epoch = getattr(self._sequence, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def fetch(self, shard: int, rows: Sequence[int]) -> Sequence[Record]:
        """Return the records at these indices."""
        sequence: Any = self._sequence
        if len(rows) == 1:
            return [sequence[rows[0]]]
        if type(rows) is range and type(sequence) in SLICED_TYPES:
            records: Sequence[Record] = sequence[rows.start : rows.stop : rows.step]
            return records
        if self._get_many is not None:
            return self._get_many(list(rows))
        return [sequence[row] for row in rows]

    def open(self, epoch: int, cursor: Cursor | None) -> IndexedReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`.

        Raises:
            ResumeError: The cursor is not an index of this source.
        """
        return IndexedReader(self, epoch, cursor)

    @property
    def _get_many(self) -> Callable[[list[int]], Sequence[Record]] | None:
        get_many = getattr(self._sequence, "__getitems__", None)
        return get_many if callable(get_many) else None
