"""What records and samples take: exact where it matters, and cheap where they are alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader.pools.sizes import approximate_nbytes, sample_nbytes, sizes_of


@pytest.mark.parametrize(
    ("sample", "nbytes"),
    [
        (np.zeros((3, 4)), 96),
        ({"x": np.zeros(5, np.int16), "y": torch.zeros(3)}, 22),
        ({"nested": {"x": np.zeros(8)}}, 64),
        ([{"x": np.zeros(8)}, {"x": np.zeros(8)}], 128),
        ((np.zeros(1), np.zeros(2)), 24),
    ],
    ids=["array", "fields", "nested", "several", "tuple"],
)
def test_memory_of_arrays_and_tensors_counts(sample: Any, nbytes: int) -> None:
    assert sample_nbytes(sample) == nbytes
    assert sizes_of([sample]) == [nbytes]
    assert approximate_nbytes([sample] * 100) == 100 * nbytes


@pytest.mark.parametrize("sample", [b"x" * 100_000, "x" * 100_000, {"text": "x" * 100_000}, bytearray(100_000)], ids=type)
def test_text_and_bytes_count(sample: Any) -> None:
    assert 100_000 <= sample_nbytes(sample) <= 100_200


class Odd:
    """Its size cannot be asked for, in the ways that come to mind."""

    @property
    def nbytes(self) -> int:
        raise RuntimeError("not now")


class Lazy(Mapping[str, Any]):
    """Looking at its values would read a file."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError("looked at")

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("value", [None, 7, Odd(), Lazy(), {"x": Odd()}, [Odd()], SimpleNamespace(nbytes=len)], ids=repr)
def test_nothing_known_is_something(value: Any) -> None:
    assert 0 < sample_nbytes(value) < 500
    assert sizes_of([value]) == [sample_nbytes(value)]


def test_no_records_take_nothing() -> None:
    assert sizes_of([]) == []
    assert approximate_nbytes([]) == 0


@given(sizes=st.lists(st.sampled_from([8, 16, 100_000, 3_000_000]), max_size=200), is_last_large=st.booleans())
def test_records_that_differ_and_take_much_are_each_measured(sizes: list[int], is_last_large: bool) -> None:
    sizes = [*sizes, 3_000_000] if is_last_large else sizes
    found = sizes_of([np.empty(size, np.uint8) for size in sizes])
    assert len(found) == len(sizes)
    if (is_last_large and min(sizes) < 3_000_000) or len(sizes) <= 32:
        is_little = len(sizes) * max(sizes, default=0) < 1 << 20
        assert is_little or len(set(sizes)) == 1 or found == sizes
