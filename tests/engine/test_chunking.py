"""Chunk sizes follow the cost of a record, within bounds, and settle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.engine.chunking import MAX_BUFFER, BufferLimit, ChunkSize

costs = st.floats(0, 100)


@given(num_slots=st.integers(0, 64), buffer_size=st.integers(1, 5000), costs=st.lists(st.tuples(st.integers(0, 600), costs), max_size=30))
def test_never_more_than_keeps_every_worker_busy_nor_less_than_one(
    num_slots: int, buffer_size: int, costs: list[tuple[int, float]]
) -> None:
    chunk_size = ChunkSize(num_slots=num_slots, buffer_size=buffer_size)
    assert chunk_size.records == 1
    for num_records, service_s in costs:
        before = chunk_size.records
        chunk_size.observe(num_records, service_s)
        assert 1 <= chunk_size.records <= max(1, min(512, buffer_size // max(1, num_slots), 4 * before))


@pytest.mark.parametrize(("cost_s", "records"), [(0.0, 256), (1e-9, 256), (1e-5, 256), (0.0001, 40), (0.001, 4), (0.0041, 1), (3.0, 1)])
def test_settles_at_a_few_milliseconds_of_work(cost_s: float, records: int) -> None:
    chunk_size = ChunkSize(num_slots=4, buffer_size=1024)
    for _ in range(40):
        chunk_size.observe(chunk_size.records, chunk_size.records * cost_s)
    assert abs(chunk_size.records - records) <= 1


def test_follows_when_records_become_dear_and_cheap_again() -> None:
    chunk_size = ChunkSize(num_slots=4, buffer_size=1024)
    for cost_s, expected in [(0.0001, 40), (0.01, 1), (0.0001, 40)]:
        for _ in range(60):
            chunk_size.observe(chunk_size.records, chunk_size.records * cost_s)
        assert abs(chunk_size.records - expected) <= 2


def test_a_chunk_of_nothing_teaches_nothing() -> None:
    chunk_size = ChunkSize(num_slots=1, buffer_size=100)
    chunk_size.observe(0, 5.0)
    chunk_size.observe(1, 0.001)
    assert chunk_size.records == 4


blocks = st.lists(st.tuples(st.integers(0, 512), st.integers(0, 1 << 30), st.integers(1, 512)), max_size=30)


@given(fixed=st.none() | st.integers(1, 10_000), memory_limit=st.integers(1, 1 << 32), num_workers=st.integers(1, 64), blocks=blocks)
def test_the_buffer_keeps_within_what_was_asked_for(
    fixed: int | None, memory_limit: int, num_workers: int, blocks: list[tuple[int, int, int]]
) -> None:
    buffer = BufferLimit(fixed=fixed, memory_limit=memory_limit, num_workers=num_workers)
    for num_records, nbytes, chunk_size in blocks:
        limit = buffer.after(num_records, nbytes, chunk_size)
        assert 1 <= limit <= (fixed or MAX_BUFFER)
        if num_records and limit > 1:
            assert limit * nbytes / num_records <= memory_limit * 1.001


def test_the_buffer_grows_again_after_large_records() -> None:
    buffer = BufferLimit(fixed=1000, memory_limit=1 << 20, num_workers=2)
    assert buffer.after(1, 1 << 19, 1) == 2
    for _ in range(300):
        limit = buffer.after(10, 1000, 10)
    assert limit == 1000


def test_the_buffer_follows_the_chunks_where_it_is_not_fixed() -> None:
    buffer = BufferLimit(fixed=None, memory_limit=1 << 40, num_workers=4)
    assert [buffer.after(0, 0, size) for size in (1, 8, 512)] == [256, 2048, MAX_BUFFER]
