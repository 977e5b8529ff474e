from __future__ import annotations

from typing import Any

import pytest

from aioloader.errors import ConfigError, SourceError
from aioloader.sources import SequenceSource
from tests.sources.conformance import check_failure, read_all


class Squares:
    """A map-style dataset of which record `bad` cannot be read."""

    def __init__(self, bad: int | None = None, failure: type[BaseException] = ValueError) -> None:
        self.bad = bad
        self.failure = failure
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        if index == self.bad:
            raise self.failure("boom")
        return index * index


class BatchedSquares(Squares):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class ShortBatches(Squares):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices[1:]]


@pytest.mark.parametrize("kind", [Squares, BatchedSquares])
@pytest.mark.parametrize("failure", [ValueError, IndexError, KeyError, BaseException, StopIteration])
async def test_a_failure_keeps_its_place(kind: type[Squares], failure: type[BaseException]) -> None:
    source = SequenceSource(kind(bad=70, failure=failure), name="squares")
    before = [index * index for index in range(70)]
    error = await check_failure(source, before=before, match=r"record squares\[70\]", kind=SourceError)
    assert isinstance(error.__cause__, failure)


async def test_an_interrupt_passes() -> None:
    reader = SequenceSource(BatchedSquares(bad=0, failure=KeyboardInterrupt)).open(0, None)
    with pytest.raises(KeyboardInterrupt, match="boom"):
        reader.read(1)


def test_seeking_reads_nothing() -> None:
    squares = Squares()
    reader = SequenceSource(squares).open(0, 98)
    span = reader.read(10)
    assert span is not None
    assert (span.records, span.ids) == ([98 * 98, 99 * 99], [("sequence", 98), ("sequence", 99)])
    assert squares.asked == [98, 99]


async def test_batches_of_the_wrong_length_are_read_one_by_one() -> None:
    assert [record for _, record in await read_all(SequenceSource(ShortBatches()))] == [index * index for index in range(100)]


def test_a_sequence_that_shrinks_is_a_failure() -> None:
    records = [1, 2, 3]
    reader = SequenceSource(records).open(0, None)
    del records[1:]
    assert reader.read(3) is not None
    with pytest.raises(SourceError, match=r"record sequence\[1\].*IndexError"):
        reader.read(3)


@pytest.mark.parametrize("sequence", ["text", b"bytes", {"a": 1}, 3, iter([1]), {1, 2}])
def test_what_has_no_index_is_refused(sequence: Any) -> None:
    with pytest.raises(ConfigError, match="SequenceSource: expected an object with __len__ and __getitem__ by index"):
        SequenceSource(sequence)


def test_facts() -> None:
    source = SequenceSource(range(7), name="seven")
    assert source.num_records == 7
    assert source.fingerprint() == {"kind": "sequence", "name": "seven", "of": "range", "num_records": 7}
    assert repr(source) == "SequenceSource(range, name='seven')"
