"""Sequences that cost per block and not per record: ids as ranges, samples as columns, several sequences as one.

All are immutable, index and slice like lists, and equal any sequence with the same entries in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any, TypeVar, overload

from aioloader.protocols import Item, RecordId, Sample

__all__ = [
    "Chain",
    "Column",
    "ItemRun",
    "RaggedRows",
    "RowIds",
    "Rows",
    "SampleColumns",
    "as_tensor",
    "columns_of",
    "dense",
    "followed_by",
    "parts_of",
    "samples_of",
]

T = TypeVar("T")


class _Sequence(Sequence[T]):
    """Equality and text of a list."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"


class RowIds(_Sequence[RecordId]):
    """The ids of rows of one shard."""

    __slots__ = ("rows", "shard")

    def __init__(self, shard: str, rows: range) -> None:
        self.shard = shard
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> RecordId: ...
    @overload
    def __getitem__(self, index: slice) -> RowIds: ...
    def __getitem__(self, index: int | slice) -> RecordId | RowIds:
        if isinstance(index, slice):
            return RowIds(self.shard, self.rows[index])
        return (self.shard, self.rows[index])

    def __iter__(self) -> Iterator[RecordId]:
        return zip(repeat(self.shard), self.rows, strict=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return RowIds, (self.shard, self.rows)


class Chain(_Sequence[T]):
    """Several sequences, one after another. A slice inside one part is that part's own slice."""

    __slots__ = ("_num_entries", "parts")

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self.parts = parts
        self._num_entries = sum(map(len, parts))

    @staticmethod
    def of(parts: Sequence[Sequence[T]]) -> Sequence[T]:
        """Return the parts as one sequence; a single part as it is."""
        return parts[0] if len(parts) == 1 else Chain(parts)

    def __len__(self) -> int:
        return self._num_entries

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if not isinstance(index, slice):
            at = range(self._num_entries)[index]
            for part in self.parts:
                if at < len(part):
                    return part[at]
                at -= len(part)
        first, stop, step = index.indices(self._num_entries)  # type: ignore[union-attr]
        if step != 1:
            return list(self)[index]
        cut = []
        for part in self.parts:
            if first < len(part) and stop > 0:
                cut.append(part[max(0, first) : stop])
            first, stop = first - len(part), stop - len(part)
        return Chain.of(cut) if cut else []

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self.parts)


class Rows(_Sequence[Any]):
    """A field whose values have one shape: arrays with a row for each sample.

    Attributes:
        pieces: The values, [num_samples, ...] when joined along the first axis; of one dtype and row shape. At least one.
        torch_dtype: Name of the dtype if the values are tensors; the arrays may hold their bits only.
    """

    __slots__ = ("pieces", "torch_dtype")

    def __init__(self, pieces: list[Any], torch_dtype: str | None) -> None:
        self.pieces = pieces
        self.torch_dtype = torch_dtype

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Rows([self.joined()[index]], self.torch_dtype)
        at = range(len(self))[index]
        for piece in self.pieces:
            if at < len(piece):
                return piece[at] if self.torch_dtype is None else as_tensor(piece, self.torch_dtype)[at]
            at -= len(piece)
        raise AssertionError("pieces that changed")

    def __iter__(self) -> Iterator[Any]:
        if self.torch_dtype is None:
            return chain.from_iterable(self.pieces)
        return iter([value for piece in self.pieces for value in as_tensor(piece, self.torch_dtype).unbind(0)])

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the values as one array."""
        return (len(self), *self.pieces[0].shape[1:])

    def joined(self) -> Any:
        """Return the values as one array: a copy if there are several pieces."""
        return self.pieces[0] if len(self.pieces) == 1 else sys.modules["numpy"].concatenate(self.pieces)

    def whole(self) -> Any:
        """Return the values as one array or tensor, whatever they are."""
        return self.joined() if self.torch_dtype is None else as_tensor(self.joined(), self.torch_dtype)

    def fits(self, other: Rows) -> bool:
        """Return whether the rows of both have one dtype and shape."""
        mine, its = self.pieces[0], other.pieces[0]
        return bool(mine.dtype == its.dtype and mine.shape[1:] == its.shape[1:] and self.torch_dtype == other.torch_dtype)


class RaggedRows(_Sequence[Any]):
    """A field whose values differ in length along their first axis: one array with all of them, and where each begins."""

    __slots__ = ("_flat", "_lengths", "_starts", "torch_dtype")

    def __init__(self, flat: Any, starts: Sequence[int], lengths: Sequence[int], torch_dtype: str | None) -> None:
        self._flat = flat
        self._starts = starts
        self._lengths = lengths
        self.torch_dtype = torch_dtype

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return RaggedRows(self._flat, self._starts[index], self._lengths[index], self.torch_dtype)
        return self._values()[self._starts[index] :][: self._lengths[index]]

    def __iter__(self) -> Iterator[Any]:
        values = self._values()
        return iter([values[start : start + length] for start, length in zip(self._starts, self._lengths, strict=True)])

    def __reduce__(self) -> tuple[Any, ...]:
        first = min(self._starts, default=0)
        last = max(map(int.__add__, self._starts, self._lengths), default=0)
        return RaggedRows, (self._flat[first:last], [start - first for start in self._starts], list(self._lengths), self.torch_dtype)

    def _values(self) -> Any:
        return self._flat if self.torch_dtype is None else as_tensor(self._flat, self.torch_dtype)


Column = list[Any] | Rows | RaggedRows
"""The values of one field; a list where they are no arrays, or of several kinds."""


class SampleColumns(_Sequence[Sample]):
    """Samples stored by field. Iterating and indexing make them: equal to what went in, their arrays views of the columns.

    Attributes:
        keys: The fields of the samples, all dicts; None if they are bare values.
        columns: One for each key; the only one for bare values.
    """

    __slots__ = ("columns", "keys")

    def __init__(self, keys: tuple[Any, ...] | None, columns: Sequence[Column]) -> None:
        self.keys = keys
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> SampleColumns: ...
    def __getitem__(self, index: int | slice) -> Sample | SampleColumns:
        values = [column[index] for column in self.columns]
        if isinstance(index, slice):
            return SampleColumns(self.keys, values)
        return values[0] if self.keys is None else dict(zip(self.keys, values, strict=True))

    def __iter__(self) -> Iterator[Sample]:
        if self.keys is None:
            return iter(self.columns[0])
        keys = self.keys
        return (dict(zip(keys, values, strict=True)) for values in zip(*self.columns, strict=True))


class ItemRun(_Sequence[Item]):
    """The items of consecutive records that gave one sample each."""

    __slots__ = ("records", "samples", "seqs")

    def __init__(self, samples: Sequence[Sample], seqs: Sequence[int], records: Sequence[RecordId]) -> None:
        self.samples = samples
        self.seqs = seqs
        self.records = records

    def __len__(self) -> int:
        return len(self.seqs)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> ItemRun: ...
    def __getitem__(self, index: int | slice) -> Item | ItemRun:
        if isinstance(index, slice):
            return ItemRun(self.samples[index], self.seqs[index], self.records[index])
        return Item(self.samples[index], self.seqs[index], 0, self.records[index])

    def __iter__(self) -> Iterator[Item]:
        return map(Item, self.samples, self.seqs, repeat(0), self.records)


def followed_by(first: Sequence[T], second: Sequence[T]) -> Sequence[T] | None:
    """Return two ranges, or the ids of two ranges of rows, as one; None where the second does not go on where the first ends."""
    joined: Any = None
    if isinstance(first, range) and isinstance(second, range):
        joined = _joined_ranges(first, second)
    elif isinstance(first, RowIds) and isinstance(second, RowIds) and first.shard == second.shard:
        rows = _joined_ranges(first.rows, second.rows)
        joined = None if rows is None else RowIds(first.shard, rows)
    return joined  # type: ignore[no-any-return]


def _joined_ranges(first: range, second: range) -> range | None:
    step = first.step
    if second.step != step or second.start != first.start + step * len(first):
        return None
    return range(first.start, second.start + step * len(second), step)


def dense(numbers: Sequence[int]) -> Sequence[int]:
    """Return rising numbers as a range, where none is left out."""
    if type(numbers) is range or not numbers or numbers[-1] - numbers[0] + 1 != len(numbers):
        return numbers
    return range(numbers[0], numbers[-1] + 1)


def parts_of(sequence: Sequence[T]) -> Sequence[Sequence[T]]:
    """Return the parts of a chain; any other sequence is one part."""
    return sequence.parts if isinstance(sequence, Chain) else [sequence]


def samples_of(items: Sequence[Item]) -> Sequence[Sample]:
    """Return the samples of items; in columns where they are."""
    if isinstance(items, ItemRun):
        return items.samples
    parts = parts_of(items)
    return Chain.of([part.samples if isinstance(part, ItemRun) else [item.sample for item in part] for part in parts])


def columns_of(samples: Sequence[Sample]) -> dict[Any, Sequence[Any]] | None:
    """Return samples by field, where all of them are in columns of the same fields."""
    if isinstance(samples, SampleColumns):
        return None if samples.keys is None else dict(zip(samples.keys, samples.columns, strict=True))
    parts = parts_of(samples)
    keys = parts[0].keys if isinstance(parts[0], SampleColumns) else None
    if keys is None or any(not isinstance(part, SampleColumns) or part.keys != keys for part in parts):
        return None
    return {key: _joined([part.columns[at] for part in parts]) for at, key in enumerate(keys)}  # type: ignore[attr-defined]


def _joined(columns: Sequence[Column]) -> Sequence[Any]:
    """Return a field of consecutive blocks as one column."""
    first = columns[0]
    if isinstance(first, Rows) and all(isinstance(column, Rows) and column.fits(first) for column in columns):
        return Rows([piece for column in columns for piece in column.pieces], first.torch_dtype)  # type: ignore[union-attr]
    return Chain.of(columns)


def as_tensor(array: Any, dtype: str) -> Any:
    """Return an array as a tensor over the same memory; `dtype` is torch's name, where NumPy has only its bits."""
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array)
    kind = getattr(torch, dtype)
    return tensor if tensor.dtype == kind else tensor.view(kind)
