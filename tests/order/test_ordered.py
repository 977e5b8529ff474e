"""Sources in an order: indexed ones dealt out by position, streams shuffled window by window, both resumed anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ResumeError, SourceError
from aioloader.order.indexed import IndexedOrder
from aioloader.order.ordered import OrderedIndex, ShuffledStream, order_source
from aioloader.order.shuffle import Shuffle
from aioloader.order.window import WindowOrder
from aioloader.protocols import Json, Reader, Record, Share, Source
from aioloader.sources import AsyncIterableSource, IterableSource, SequenceSource
from tests.sources.conformance import check_foreign_cursors, check_source, read_all, read_span, read_with_cursors

RECORDS = [{"n": number} for number in range(23)]
SHUFFLE = Shuffle(window=5, shards_in_window=2, seed=4)


class Shards:
    """An indexed source of several shards, one of them empty, that notes what is fetched."""

    def __init__(self, sizes: Sequence[int] = (4, 0, 7, 1, 5), *, fetches_many: bool = True) -> None:
        self.shard_sizes = sizes
        self.fetches_many = fetches_many
        self.fetched: list[tuple[int, int]] = []
        self.epochs: list[int] = []

    def shard_name(self, shard: int) -> str:
        return f"shard-{shard}"

    def start_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def fetch(self, shard: int, rows: Sequence[int]) -> Sequence[Record]:
        self.fetched += [(shard, row) for row in rows]
        return [f"{shard}:{row}" for row in rows]

    def fingerprint(self) -> dict[str, Json]:
        return {"kind": "shards", "sizes": list(self.shard_sizes)}

    def open(self, epoch: int, cursor: Any) -> Reader:
        return OrderedIndex(self, None, 0).open(epoch, cursor)


def generate() -> Iterator[Record]:
    yield from RECORDS


async def generate_async() -> AsyncIterator[Record]:
    for record in RECORDS:
        yield record


def windows_of(records: list[Record], epoch: int = 0) -> list[Record]:
    order = WindowOrder(SHUFFLE, 0, epoch, "records")
    handed: list[Record] = []
    for window, first in enumerate(range(0, len(records), SHUFFLE.window)):
        part = records[first : first + SHUFFLE.window]
        handed += [part[at] for at in order.permutation(window, len(part))]
    return handed


def shards_of(epoch: int = 0) -> list[Record]:
    source = Shards()
    order = IndexedOrder(source.shard_sizes, SHUFFLE, 0, epoch)
    return [f"{shard}:{row}" for shard, row in map(order.locate_one, range(17))]


CASES: dict[str, tuple[Callable[[], Source], list[Record]]] = {
    "stream": (lambda: ShuffledStream(IterableSource(generate), SHUFFLE, 0), windows_of(RECORDS)),
    "async stream": (lambda: ShuffledStream(AsyncIterableSource(generate_async), SHUFFLE, 0), windows_of(RECORDS)),
    "short stream": (lambda: ShuffledStream(IterableSource(RECORDS[:3]), SHUFFLE, 0), windows_of(RECORDS[:3])),
    "nothing": (lambda: ShuffledStream(IterableSource([]), SHUFFLE, 0), []),
    "shards": (lambda: OrderedIndex(Shards(), None, 0), [f"{s}:{r}" for s, n in enumerate((4, 0, 7, 1, 5)) for r in range(n)]),
    "shuffled shards": (lambda: OrderedIndex(Shards(), SHUFFLE, 0), shards_of()),
    "slow shards": (lambda: OrderedIndex(Shards(fetches_many=False), SHUFFLE, 0), shards_of()),
    "sequence": (lambda: order_source(SequenceSource(RECORDS), None, 0), RECORDS),
}


@pytest.mark.parametrize("case", CASES)
async def test_contract(case: str) -> None:
    make, expected = CASES[case]
    await check_source(make(), expected, other=make())


@pytest.mark.parametrize("case", CASES)
async def test_cursors_of_other_sources_are_refused(case: str) -> None:
    await check_foreign_cursors(CASES[case][0]())


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), count=st.integers(1, 5), reads=st.lists(st.integers(1, 9), min_size=1))
def test_shares_are_a_disjoint_cover_of_the_order(sizes: list[int], count: int, reads: list[int]) -> None:
    everything = [
        record for record, _ in zip(_read(OrderedIndex(Shards(sizes), SHUFFLE, 3).open(2, None), reads), range(sum(sizes)), strict=True)
    ]
    fetched = []
    for index in range(count):
        source = Shards(sizes)
        own = _read(OrderedIndex(source, SHUFFLE, 3).open_share(2, None, Share(index, count)), reads)
        assert own == everything[index::count]
        assert source.epochs == [2]
        fetched += source.fetched
    assert len(fetched) == len(set(fetched)) == sum(sizes)  # nobody fetches what another rank works on


@given(count=st.integers(1, 4), index=st.integers(0, 3), cut=st.integers(0, 17), reads=st.lists(st.integers(1, 5), min_size=1))
def test_the_spans_of_a_share_cover_all_positions(count: int, index: int, cut: int, reads: list[int]) -> None:
    share = Share(index % count, count)
    reader = OrderedIndex(Shards(), SHUFFLE, 3).open_share(0, cut, share)
    position, turn = cut, 0
    while (span := reader.read(reads[turn % len(reads)])) is not None:
        first = share.first_from(position)
        assert first + (len(span.records) - 1) * count < position + span.num_positions <= 17
        position += span.num_positions
        assert reader.cursor() == position
        turn += 1
    assert share.first_from(position) >= 17


def _read(reader: Any, reads: list[int]) -> list[Record]:
    found: list[Record] = []
    turn = 0
    while (span := reader.read(reads[turn % len(reads)])) is not None:
        found += span.records
        turn += 1
    return found


async def test_each_epoch_is_shuffled_anew_and_the_same_each_time() -> None:
    for source in (ShuffledStream(IterableSource(RECORDS), SHUFFLE, 0), OrderedIndex(Shards(), SHUFFLE, 0)):
        epochs = [await read_all(source, epoch=epoch) for epoch in (0, 1, 0)]
        assert epochs[0] == epochs[2] != epochs[1]
        assert sorted(map(repr, epochs[0])) == sorted(map(repr, epochs[1]))


async def test_a_stream_resumed_in_a_window_reads_that_window_again_and_no_more() -> None:
    reads: list[int] = []

    class Stateful:
        at = 0

        def __iter__(self) -> Iterator[int]:
            while self.at < 40:
                self.at += 1
                reads.append(self.at - 1)
                yield self.at - 1

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    source = ShuffledStream(IterableSource(Stateful), SHUFFLE, 0)
    found, cursors = await read_with_cursors(source)
    for number, cursor in cursors[:-1]:
        reads.clear()
        assert await read_all(source, cursor=cursor) == found[number:]
        assert not reads or reads[0] >= number - number % SHUFFLE.window


async def test_a_stream_that_fails_delivers_the_windows_before_and_resumes_exactly() -> None:
    is_mended = False

    def flaky() -> Iterator[int]:
        for number in range(20):
            if number == 13 and not is_mended:
                raise OSError("gone")
            yield number

    source = ShuffledStream(IterableSource(flaky), SHUFFLE, 0)
    reader: Any = source.open(0, None)
    before: list[Record] = []
    with pytest.raises(SourceError, match="gone"):  # noqa: PT012
        while (span := await read_span(reader, 3)) is not None:
            before += span.records
    assert len(before) == 10  # the third window is not whole, so its order is not known
    cursor = reader.cursor()
    is_mended = True
    rest = [record for _, record in await read_all(source, cursor=cursor)]
    assert before + rest == [record for _, record in await read_all(source)]


async def test_data_that_shrank_inside_a_window_are_refused() -> None:
    _, cursors = await read_with_cursors(ShuffledStream(IterableSource(RECORDS), SHUFFLE, 0))
    short = ShuffledStream(IterableSource(RECORDS[:21]), SHUFFLE, 0)
    with pytest.raises(ResumeError, match="records in window 4"):
        await read_all(short, cursor=cursors[22][1])
