"""Chunk sizes follow the cost of a record, within bounds, and settle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.engine.chunking import MAX_BUFFER, ChunkSize, buffer_limit

costs = st.floats(0, 100)


@given(num_slots=st.integers(0, 64), buffer_size=st.integers(1, 5000), costs=st.lists(st.tuples(st.integers(0, 600), costs), max_size=30))
def test_never_more_than_keeps_every_worker_busy_nor_less_than_one(
    num_slots: int, buffer_size: int, costs: list[tuple[int, float]]
) -> None:
    chunk_size = ChunkSize(num_slots=num_slots, buffer_size=buffer_size, memory_limit=1 << 40)
    assert chunk_size.records == 1
    for num_records, service_s in costs:
        before = chunk_size.records
        chunk_size.observe(num_records, service_s, num_records)
        assert 1 <= chunk_size.records <= max(1, min(512, buffer_size // max(1, num_slots), 4 * before))


@pytest.mark.parametrize(("cost_s", "records"), [(0.0, 256), (1e-9, 256), (1e-5, 256), (0.0001, 40), (0.001, 4), (0.0041, 1), (3.0, 1)])
def test_settles_at_a_few_milliseconds_of_work(cost_s: float, records: int) -> None:
    chunk_size = ChunkSize(num_slots=4, buffer_size=1024, memory_limit=1 << 40)
    for _ in range(40):
        chunk_size.observe(chunk_size.records, chunk_size.records * cost_s, 1)
    assert abs(chunk_size.records - records) <= 1


def test_follows_when_records_become_dear_and_cheap_again() -> None:
    chunk_size = ChunkSize(num_slots=4, buffer_size=1024, memory_limit=1 << 40)
    for cost_s, expected in [(0.0001, 40), (0.01, 1), (0.0001, 40)]:
        for _ in range(60):
            chunk_size.observe(chunk_size.records, chunk_size.records * cost_s, 1)
        assert abs(chunk_size.records - expected) <= 2


def test_a_chunk_of_nothing_teaches_nothing() -> None:
    chunk_size = ChunkSize(num_slots=1, buffer_size=100, memory_limit=1 << 40)
    chunk_size.observe(0, 5.0, 9)
    chunk_size.observe(1, 0.001, 9)
    assert chunk_size.records == 4


@pytest.mark.parametrize(("hop_s", "records"), [(0.0, 4), (0.0001, 4), (0.0002, 8), (0.0005, 20), (0.1, 32)])
def test_a_dear_hop_makes_chunks_larger_within_bounds(hop_s: float, records: int) -> None:
    chunk_size = ChunkSize(num_slots=4, buffer_size=1024, memory_limit=1 << 40)
    chunk_size.observe_hop(hop_s)
    for _ in range(40):
        chunk_size.observe(chunk_size.records, chunk_size.records * 0.001, 1)
    assert abs(chunk_size.records - records) <= 1


@pytest.mark.parametrize(("memory_limit", "records"), [(1 << 40, 16), (1 << 28, 16), (1 << 25, 2), (1, 1)])
def test_a_chunk_of_large_records_holds_few(memory_limit: int, records: int) -> None:
    chunk_size = ChunkSize(num_slots=4, buffer_size=1024, memory_limit=memory_limit)
    for _ in range(10):
        chunk_size.observe(chunk_size.records, 0.0, chunk_size.records << 20)
    assert chunk_size.records == records


@given(fixed=st.none() | st.integers(1, 10_000), num_workers=st.integers(1, 64), chunk_size=st.integers(1, 512))
def test_the_buffer_is_what_was_asked_for_or_follows_the_chunks(fixed: int | None, num_workers: int, chunk_size: int) -> None:
    limit = buffer_limit(fixed, num_workers=num_workers, chunk_size=chunk_size)
    assert limit == fixed if fixed else 256 <= limit <= MAX_BUFFER


def test_the_buffer_keeps_workers_busy_behind_a_slow_record() -> None:
    assert [buffer_limit(None, num_workers=4, chunk_size=size) for size in (1, 8, 512)] == [256, 2048, MAX_BUFFER]
