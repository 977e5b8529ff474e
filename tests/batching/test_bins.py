from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.batching.bins import FitStrategy, OpenRows, pack_lengths

SEQ_LEN = 20
properties = settings(max_examples=60, deadline=None)
lengths_lists = st.lists(st.integers(1, SEQ_LEN), max_size=60)
options_of_rows = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(["first_fit", "best_fit"]),
        "open_bins": st.none() | st.integers(1, 6),
        "max_age": st.none() | st.integers(1, 12),
    }
)


def lognormal(mean: float, sigma: float, seq_len: int) -> list[int]:
    """Return the lengths of 10^5 documents, of which those that are too long lost the rows that they fill."""
    rng = np.random.default_rng(7)
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 100_000).astype(int) % seq_len
    return [length for length in lengths.tolist() if length]


def first_fit(lengths: Sequence[int]) -> list[list[int]]:
    """Return rows by first fit as it is usually written: every document goes to the first row that has room for it."""
    rows: list[list[int]] = []
    rooms: list[int] = []
    for number, length in enumerate(lengths):
        at = next((index for index, room in enumerate(rooms) if length <= room), len(rows))
        if at == len(rows):
            rows.append([])
            rooms.append(SEQ_LEN)
        rows[at].append(number)
        rooms[at] -= length
    return rows


@properties
@given(lengths=lengths_lists, options=options_of_rows)
def test_every_document_is_in_one_row_and_rows_hold_no_more_than_they_can(lengths: list[int], options: dict[str, Any]) -> None:
    rows = list(pack_lengths(lengths, SEQ_LEN, **options))
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in row) <= SEQ_LEN for row in rows)
    assert all(row == sorted(row) for row in rows)


@properties
@given(lengths=lengths_lists)
def test_first_fit_is_first_fit(lengths: list[int]) -> None:
    assert list(pack_lengths(lengths, SEQ_LEN, strategy="first_fit", open_bins=1000)) == first_fit(lengths)


@properties
@given(lengths=lengths_lists, options=options_of_rows)
def test_each_row_takes_the_oldest_document(lengths: list[int], options: dict[str, Any]) -> None:
    left = set(range(len(lengths)))
    for row in pack_lengths(lengths, SEQ_LEN, **options):
        assert row[0] == min(left)
        left -= set(row)


def test_best_fit_takes_the_pair_that_fills_the_row() -> None:
    # 7 + 13 leaves nothing, and so do 9 + 5 + 6; the longest that fits each gap would give 7 + 11 and 13 + 6.
    assert list(pack_lengths([7, 11, 13, 9, 5, 6], SEQ_LEN, open_bins=3)) == [[0, 2], [1, 3], [4, 5]]
    assert list(pack_lengths([9, 8, 4, 5, 6, 13], SEQ_LEN, open_bins=2)) == [[0, 3, 4], [1, 2], [5]]


def test_best_fit_takes_one_document_where_two_are_no_better() -> None:
    assert next(pack_lengths([12, 3, 5, 8, 12], SEQ_LEN, open_bins=2)) == [0, 3]


def test_a_row_stays_open_until_enough_is_held() -> None:
    rows = OpenRows(SEQ_LEN, strategy="best_fit", open_bins=2)
    for length in (15, 15, 9):
        rows.add(length)
        assert not rows.is_ripe
    rows.add(1)
    assert rows.is_ripe
    assert (len(rows), rows.num_tokens) == (4, 40)
    rows.close()
    assert not rows.is_ripe


def test_by_default_64_documents_are_held_that_are_worth_two_rows() -> None:
    for length, num_held in ((10, 64), (1, 64), (SEQ_LEN, 64)):
        rows = OpenRows(SEQ_LEN, strategy="best_fit")
        while not rows.is_ripe:
            rows.add(length)
        assert len(rows) == num_held
    rows = OpenRows(1000, strategy="best_fit")
    while not rows.is_ripe:
        rows.add(10)
    assert len(rows) == 200


@properties
@given(
    lengths=st.lists(st.integers(1, SEQ_LEN), max_size=80), max_age=st.integers(1, 12), strategy=st.sampled_from(["first_fit", "best_fit"])
)
def test_no_document_waits_for_more_than_max_age_others(lengths: list[int], max_age: int, strategy: FitStrategy) -> None:
    rows = OpenRows(SEQ_LEN, strategy=strategy, open_bins=1000, max_age=max_age)
    for length in lengths:
        rows.add(length)
        while rows.is_ripe:
            assert rows.ages[0] == max_age
            rows.close()
        assert all(age < max_age for age in rows.ages)


@properties
@given(lengths=lengths_lists, more=lengths_lists, options=options_of_rows)
def test_restored_rows_go_on_alike(lengths: list[int], more: list[int], options: dict[str, Any]) -> None:
    rows = OpenRows(SEQ_LEN, **options)
    by_ticket: dict[int, int] = {}
    for length in lengths:
        by_ticket[rows.add(length)] = length
        while rows.is_ripe:
            for ticket in rows.close():
                del by_ticket[ticket]
    again = OpenRows(SEQ_LEN, **options)
    tickets = again.restore(by_ticket.values(), rows.ages)
    names = dict(zip(tickets, by_ticket, strict=True))
    for length in more:
        names[again.add(length)] = rows.add(length)
        assert again.is_ripe == rows.is_ripe
        while rows.is_ripe:
            assert [names[ticket] for ticket in again.close()] == rows.close()
    assert again.ages == rows.ages


def test_documents_of_one_length_are_told_apart() -> None:
    rows = list(pack_lengths([5] * 1000, SEQ_LEN))
    assert rows == [list(range(first, first + 4)) for first in range(0, 1000, 4)]


@pytest.mark.parametrize(("mean", "sigma", "seq_len"), [(600, 0.8, 2048), (800, 1.0, 2048), (1000, 1.0, 2048), (800, 1.0, 8192)])
def test_best_fit_uses_99_5_percent_of_rows(mean: float, sigma: float, seq_len: int) -> None:
    lengths = lognormal(mean, sigma, seq_len)
    num_rows = sum(1 for _ in pack_lengths(lengths, seq_len))
    assert sum(lengths) / (num_rows * seq_len) >= 0.995


def test_the_order_is_pinned() -> None:
    lengths = [number * number * 7919 % 1511 + 1 for number in range(400)]
    rows = list(pack_lengths(lengths, 2048))
    assert rows[:4] == [[0, 26, 31], [1, 6, 40], [2, 11, 60], [3, 55, 56]]
    assert (len(rows), rows[-1]) == (144, [396])
