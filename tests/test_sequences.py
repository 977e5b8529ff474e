"""Sequences: whatever they store, they index, slice, iterate and compare like the list of their entries."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader.protocols import Item
from aioloader.sequences import Chain, ItemRun, RaggedRows, RowIds, Rows, SampleColumns, columns_of, dense, followed_by, samples_of

slices = st.builds(slice, st.none() | st.integers(-12, 12), st.none() | st.integers(-12, 12), st.none() | st.integers(1, 4))


def plain(value: Any) -> Any:
    """Return arrays and tensors, also inside samples, as lists, and sequences as lists of those."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, Sequence) and not isinstance(value, str | tuple) else value


def check(sequence: Sequence[Any], entries: list[Any], part: slice) -> None:
    assert plain(list(sequence)) == plain(entries)
    assert len(sequence) == len(entries)
    assert plain(list(sequence[part])) == plain(entries[part])
    for index in range(-len(entries), len(entries)):
        assert plain(sequence[index]) == plain(entries[index])
    with pytest.raises(IndexError):
        sequence[len(entries)]


@given(first=st.integers(0, 9), count=st.integers(0, 9), step=st.integers(1, 3), part=slices)
def test_row_ids(first: int, count: int, step: int, part: slice) -> None:
    ids = RowIds("shard", range(first, first + count * step, step))
    entries = [("shard", first + at * step) for at in range(count)]
    check(ids, entries, part)
    assert ids == entries
    assert pickle.loads(pickle.dumps(ids)) == ids
    assert ids != [*entries, ("shard", 99)]


@given(cut=st.integers(0, 6), step=st.integers(1, 3))
def test_row_ids_that_go_on_are_joined(cut: int, step: int) -> None:
    whole = RowIds("shard", range(3, 3 + 6 * step, step))
    assert not cut or followed_by(whole[:cut], whole[cut:]) == whole
    assert followed_by(whole, RowIds("other", range(3 + 6 * step, 99, step))) is None
    assert followed_by(whole, RowIds("shard", range(4 + 6 * step, 99, step))) is None
    assert followed_by(whole, list(RowIds("shard", range(3 + 6 * step, 99, step)))) is None


@given(first=st.integers(-3, 3), cut=st.integers(0, 5), step=st.integers(1, 3))
def test_ranges_that_go_on_are_joined(first: int, cut: int, step: int) -> None:
    whole = range(first, first + 5 * step, step)
    assert not cut or followed_by(whole[:cut], whole[cut:]) == whole
    assert followed_by(whole, range(first + 5 * step + 1, 99, step)) is None
    assert followed_by(whole, range(first + 5 * step, 99, step + 1)) is None
    assert followed_by(whole, list(range(first + 5 * step, 99, step))) is None


@given(numbers=st.lists(st.integers(-9, 9), unique=True).map(sorted))
def test_rising_numbers_without_a_gap_are_a_range(numbers: list[int]) -> None:
    found = dense(numbers)
    assert list(found) == numbers
    assert isinstance(found, range) == (numbers != [] and numbers[-1] - numbers[0] == len(numbers) - 1)
    assert dense(found) is found


@given(parts=st.lists(st.lists(st.integers(), max_size=4), min_size=1, max_size=4), part=slices)
def test_chains(parts: list[list[int]], part: slice) -> None:
    entries = [entry for one in parts for entry in one]
    check(Chain(parts), entries, part)
    assert Chain.of(parts) == entries


@given(count=st.integers(1, 8), tensors=st.booleans(), pieces=st.integers(1, 3), part=slices)
def test_rows_of_one_shape(count: int, tensors: bool, pieces: int, part: slice) -> None:
    array = np.arange(count * 6).reshape(count, 2, 3)
    rows = Rows(np.array_split(array, min(pieces, count)), "int64" if tensors else None)
    check(rows, list(torch.from_numpy(array) if tensors else array), part)
    assert rows.shape == (count, 2, 3)
    assert rows.joined().tolist() == array.tolist()
    assert all(isinstance(value, torch.Tensor if tensors else np.ndarray) for value in rows)


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=8), tensors=st.booleans(), part=slices)
def test_rows_of_several_lengths(lengths: list[int], tensors: bool, part: slice) -> None:
    flat = np.arange(sum(lengths))
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    entries = [flat[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    check(RaggedRows(flat, starts, lengths, "int64" if tensors else None), entries, part)


def samples(count: int) -> tuple[SampleColumns, list[dict[str, Any]]]:
    array = np.arange(count * 2).reshape(count, 2)
    columns = SampleColumns(("x", "name"), [Rows([array], None), [f"n{at}" for at in range(count)]])
    return columns, [{"x": array[at], "name": f"n{at}"} for at in range(count)]


@given(count=st.integers(1, 8), part=slices)
def test_samples_in_columns(count: int, part: slice) -> None:
    columns, entries = samples(count)
    check(columns, entries, part)
    assert list(columns[0]) == ["x", "name"]
    check(SampleColumns(None, [[1, 2, 3]]), [1, 2, 3], part)


@given(count=st.integers(1, 8), part=slices)
def test_runs_of_items(count: int, part: slice) -> None:
    columns, entries = samples(count)
    run = ItemRun(columns, range(5, 5 + count), RowIds("shard", range(count)))
    items = [Item(entry, 5 + at, 0, ("shard", at)) for at, entry in enumerate(entries)]
    assert [plain(item.sample) for item in run[part]] == [plain(item.sample) for item in items[part]]
    assert [item[1:] for item in run[part]] == [item[1:] for item in items[part]]
    assert run[count - 1].ref == items[-1].ref


def test_the_columns_of_consecutive_blocks_are_joined_without_a_copy() -> None:
    arrays = [np.zeros((3, 2)), np.ones((2, 2))]
    blocks = [SampleColumns(("x", "name"), [Rows([array], None), ["n"] * len(array)]) for array in arrays]
    found = columns_of(samples_of(Chain([ItemRun(block, range(len(block)), []) for block in blocks])))
    assert found is not None
    assert isinstance(found["x"], Rows)
    assert [piece is array for piece, array in zip(found["x"].pieces, arrays, strict=True)] == [True, True]
    assert list(found["name"]) == ["n"] * 5


def test_only_samples_with_the_same_fields_have_columns() -> None:
    columns, entries = samples(2)
    other = SampleColumns(("y",), [[1, 2]])
    assert columns_of(entries) is None
    assert columns_of(Chain([columns, entries])) is None
    assert columns_of(Chain([columns, other])) is None
    assert columns_of(SampleColumns(None, [[1, 2]])) is None
