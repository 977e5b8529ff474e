"""Mixtures as streams: the records that the drawer names, dealt to any ranks, resumed anywhere, whatever the sources are."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.errors import ResumeError, SourceError
from aioloader.order.mixed import MixedStream
from aioloader.order.mixture import Mixture
from aioloader.order.schedule import Ramp, Steps
from aioloader.order.shuffle import Shuffle
from aioloader.protocols import Record, Share, Source
from aioloader.sources import AsyncIterableSource, IterableSource, SequenceSource
from tests.order.test_ordered import Shards
from tests.sources.conformance import check_foreign_cursors, check_source, read_all, read_span, read_with_cursors, run

SHUFFLE = Shuffle(window=5, shards_in_window=2, seed=4)


def numbers(first: int, count: int) -> Any:
    def generate() -> Iterator[int]:
        yield from range(first, first + count)

    return generate


def async_numbers(first: int, count: int) -> Any:
    async def generate() -> AsyncIterator[int]:
        for number in range(first, first + count):
            yield number

    return generate


def sources(kind: str) -> dict[str, Source]:
    if kind == "indexed":
        return {"a": SequenceSource(range(40)), "b": SequenceSource(range(100, 117)), "c": Shards()}
    if kind == "streams":
        return {
            "a": IterableSource(numbers(0, 40)),
            "b": AsyncIterableSource(async_numbers(100, 17)),
            "c": IterableSource(numbers(200, 17)),
        }
    return {"a": IterableSource(numbers(0, 40)), "b": SequenceSource(range(100, 117)), "c": AsyncIterableSource(async_numbers(200, 17))}


def mixture(**options: Any) -> Mixture:
    return Mixture({"a": (None, 0.5), "b": (None, 0.3), "c": (None, 0.2)}, **options)


def mixed(kind: str = "indexed", shuffle: Shuffle | None = None, **options: Any) -> MixedStream:
    return MixedStream(mixture(**options), sources(kind), shuffle, 0)


def length(record: Record) -> int:
    return 1 + (record if isinstance(record, int) else len(record)) % 7


OPTIONS: dict[str, dict[str, Any]] = {
    "first": {},
    "all": {"stop": "all_exhausted"},
    "limited": {"stop": "all_exhausted", "repeats": {"b": 1}},
    "steps": {"schedule": Steps([(0, {"a": 1, "b": 0, "c": 0}), (9, {"a": 0, "b": 1, "c": 1})]), "repeats": {"b": 2, "c": 2}},
    "ramp": {"schedule": Ramp([(0, {"a": 1, "b": 1, "c": 0}), (30, {"a": 0, "b": 1, "c": 3})])},
    "tokens": {"weigh": "tokens", "length": length, "stop": "all_exhausted"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["indexed", "streams", "both"])
async def test_contract(kind: str, options: str) -> None:
    found = await read_all(mixed(kind, SHUFFLE, **OPTIONS[options]))
    assert len(found) > 20
    unique = len({record_id for record_id, _ in found}) == len(found)
    if unique:
        await check_source(mixed(kind, SHUFFLE, **OPTIONS[options]), [record for _, record in found])
    else:  # a source that is repeated gives records of the same ids again
        for size in (1, 3):
            again, cursors = await read_with_cursors(mixed(kind, SHUFFLE, **OPTIONS[options]), size=size)
            assert again == found
            for before, cursor in cursors:
                assert await read_all(mixed(kind, SHUFFLE, **OPTIONS[options]), cursor=cursor, sizes=(5, 2)) == found[before:]


async def test_cursors_of_other_sources_are_refused() -> None:
    await check_foreign_cursors(mixed())


@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(["indexed", "streams", "both"]),
    options=st.sampled_from(sorted(OPTIONS)),
    count=st.integers(1, 5),
    reads=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_shares_are_a_disjoint_cover_of_the_order(kind: str, options: str, count: int, reads: list[int]) -> None:
    whole = run(read_all(mixed(kind, SHUFFLE, **OPTIONS[options]), epoch=1))
    for index in range(count):
        found, num_positions = run(_read_share(mixed(kind, SHUFFLE, **OPTIONS[options]), Share(index, count), reads))
        assert found == whole[index::count]
        assert num_positions == len(whole)


async def _read_share(source: MixedStream, share: Share, reads: list[int]) -> tuple[list[Any], int]:
    reader = source.open_share(1, None, share)
    found: list[Any] = []
    num_positions, turn = 0, 0
    while (span := await reader.read(reads[turn % len(reads)])) is not None:
        first = share.first_from(num_positions)
        num_positions += span.num_positions
        assert all(first + at * share.count < num_positions for at in range(len(span.records)))
        found += zip(span.ids, span.records, strict=True)
        turn += 1
    await reader.aclose()
    return found, num_positions


def test_a_rank_fetches_nothing_of_others_from_indexed_sources() -> None:
    fetched: list[tuple[int, int]] = []
    for index in range(3):
        shards = Shards((50, 50))
        source = MixedStream(Mixture({"s": (None, 1.0), "r": (None, 1.0)}), {"s": shards, "r": SequenceSource(range(90))}, SHUFFLE, 0)
        run(_read_share(source, Share(index, 3), [7]))
        fetched += shards.fetched
    assert len(fetched) == len(set(fetched)) > 85


async def test_realised_counts_follow_the_weights() -> None:
    found = await read_all(MixedStream(mixture(stop="all_exhausted"), sources("indexed"), None, 0))
    for stop in range(1, len(found)):
        counts = Counter(shard.partition("/")[0] for (shard, _), _ in found[:stop])
        for name, weight in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
            assert abs(counts[name] - weight * stop) < 1


async def test_a_failing_source_fails_in_its_place() -> None:
    def failing() -> Iterator[int]:
        yield from range(3)
        raise OSError("gone")

    parts: dict[str, Source] = {"good": IterableSource(numbers(100, 50)), "bad": IterableSource(failing)}
    reader: Any = MixedStream(Mixture({"good": (None, 1.0), "bad": (None, 1.0)}), parts, None, 0).open(0, None)
    before: list[Record] = []
    with pytest.raises(SourceError, match="gone"):  # noqa: PT012
        while (span := await read_span(reader, 4)) is not None:
            before += span.records
    assert [record for record in before if record < 100] == [0, 1, 2]
    assert len(before) in (6, 7)
    await reader.aclose()


async def test_an_empty_source_is_not_repeated_for_ever() -> None:
    parts: dict[str, Source] = {"a": SequenceSource(range(3)), "b": SequenceSource([])}
    source = MixedStream(Mixture({"a": (None, 1.0), "b": (None, 1.0)}, stop="repeat"), parts, None, 0)
    reader = source.open(0, None)
    with pytest.raises(SourceError, match=r"source 'b' of the mixture: expected records to repeat, got none"):  # noqa: PT012
        while await reader.read(1) is not None:
            pass
    await reader.aclose()


async def test_a_source_added_on_resume_is_recorded_and_never_by_accident() -> None:
    parts: dict[str, Source] = {"a": SequenceSource(range(40)), "b": SequenceSource(range(40))}
    small = MixedStream(Mixture({"a": (None, 1.0), "b": (None, 1.0)}), parts, None, 0)
    found, cursors = await read_with_cursors(small, size=5)
    position, cursor = cursors[4]
    large = mixed(stop="all_exhausted")
    with pytest.raises(ResumeError, match="source 'c' of the mixture"):
        large.open(0, cursor)
    with pytest.raises(ResumeError, match="keep a source that is to go, with the weight 0"):
        small.adopt(cursors[0][1], large.fingerprint(), 3)
    until = position + 7  # what lanes ahead of the cursor have delivered already comes once more as it was
    adopted = large.adopt(cursor, small.fingerprint(), until)
    rest = await read_all(large, cursor=adopted, sizes=(3, 1, 4))
    assert [record_id for record_id, _ in rest[:7]] == [record_id for record_id, _ in found[position:until]]
    counts = Counter(shard.partition("/")[0] for (shard, _), _ in rest[7:37])
    assert counts == {"a": 15, "b": 9, "c": 6}
    assert [record for (shard, _), record in rest if shard.startswith("c")][:1] == ["0:0"]
    reader = large.open(0, adopted)
    num_read = 0
    for _ in range(6):
        span = await reader.read(3)
        num_read += len(span.records) if span is not None else 0
    assert reader.cursor()["drawer"]["changes"] == [{"position": until, "added": ["c"], "removed": {}, "reweighted": True}]
    assert await read_all(large, cursor=reader.cursor()) == rest[num_read:]
    await reader.aclose()
