"""Ranks side by side: gathered by a sum, named when they are out of line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.training.stragglers import RankTable, RankTimer, RankTimes


def table(works: list[float], tokens: list[float] | None = None) -> RankTable:
    tokens = tokens or [100.0] * len(works)
    rows = [
        RankTimes(dp_rank=rank, work_s=work, data_wait_s=work / 2, num_tokens=count)
        for rank, (work, count) in enumerate(zip(works, tokens, strict=True))
    ]
    return RankTable(num_steps=10, rows=tuple(rows))


def test_a_rank_is_slow_above_one_and_a_half_times_the_median() -> None:
    found = table([0.2, 0.2, 0.32, 0.1])
    assert [row.dp_rank for row in found.stragglers] == [2]
    assert found.warnings() == ["dp_rank 2 is slow: 0.32 s of work a step, 1.6 times the median of 0.2 s; 0.16 s of it is waiting for data"]
    assert table([0.2, 0.2, 0.3, 0.1]).warnings() == []  # exactly 1.5 times


def test_of_two_ranks_the_slow_one_is_named() -> None:
    """B098: with the mean of both as the median, the slow one of two could never be 1.5 times that unless it took three times as long."""
    assert [row.dp_rank for row in table([0.1, 0.2]).stragglers] == [1]


def test_uneven_tokens_are_named() -> None:
    found = table([0.1] * 4, [700.0, 100.0, 100.0, 100.0])  # B006
    assert found.token_imbalance == 2.8
    assert found.warnings() == ["tokens are uneven: the rank with most has 2.8 times the mean; batch by tokens or balance shards"]
    assert table([0.1] * 4, [150.0, 100.0, 100.0, 50.0]).warnings() == []


def test_no_tokens_are_even_and_one_rank_is_never_slow() -> None:
    assert table([0.1], [0.0]).token_imbalance == 1.0
    assert table([0.1]).warnings() == []


@given(
    st.lists(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.integers(0, 1000)), min_size=3, max_size=3), min_size=1, max_size=5)
)
def test_a_sum_over_the_ranks_gathers_their_means(steps_of_ranks: list[list[tuple[float, float, int]]]) -> None:
    timers = [RankTimer(rank, len(steps_of_ranks)) for rank in range(len(steps_of_ranks))]
    for timer, steps in zip(timers, steps_of_ranks, strict=True):
        for work_s, wait_s, tokens in steps:
            timer.add(work_s=work_s, data_wait_s=wait_s, num_tokens=tokens)
    summed = [sum(numbers) for numbers in zip(*(timer.pack() for timer in timers), strict=True)]
    found = timers[0].unpack(summed)
    assert found.num_steps == 3
    assert [row.dp_rank for row in found.rows] == list(range(len(steps_of_ranks)))
    for row, steps in zip(found.rows, steps_of_ranks, strict=True):
        assert row.work_s == pytest.approx(sum(step[0] for step in steps) / 3)
        assert row.data_wait_s == pytest.approx(sum(step[1] for step in steps) / 3)
        assert row.num_tokens == pytest.approx(sum(step[2] for step in steps) / 3)


def test_a_table_begins_anew() -> None:
    timer = RankTimer(0, 1)
    for seconds in (1.0, 3.0):
        timer.add(work_s=seconds, data_wait_s=0.0, num_tokens=1)
        assert timer.unpack(timer.pack()).rows[0].work_s == seconds
