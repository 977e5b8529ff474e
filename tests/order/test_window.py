"""The order of a stream: each window is a permutation of its own, found again from its number alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.order.shuffle import Shuffle
from aioloader.order.window import WindowOrder


def shuffled(order: WindowOrder, num_records: int) -> list[int]:
    """Return a stream of `num_records` in the order in which a reader with a buffer of one window hands it out."""
    handed_out: list[int] = []
    size = order.shuffle.window
    for window, start in enumerate(range(0, num_records, size)):
        buffer = list(range(start, min(start + size, num_records)))
        handed_out += [buffer[index] for index in order.permutation(window, len(buffer)).tolist()]
    return handed_out


@given(size=st.integers(1, 40), num_records=st.integers(0, 150), seed=st.integers(-5, 5), epoch=st.integers(0, 3))
def test_every_record_is_handed_out_once_and_in_its_window(size: int, num_records: int, seed: int, epoch: int) -> None:
    handed_out = shuffled(WindowOrder(Shuffle(window=size), seed, epoch), num_records)
    assert sorted(handed_out) == list(range(num_records))
    assert all(record // size == place // size for place, record in enumerate(handed_out))


@given(size=st.integers(1, 40), num_records=st.integers(1, 150), data=st.data())
def test_a_window_and_an_offset_are_enough_to_go_on(size: int, num_records: int, data: st.DataObject) -> None:
    order = WindowOrder(Shuffle(window=size), 1, 2)
    position = data.draw(st.integers(0, num_records - 1))
    window, offset = order.locate(position)
    held = min(size, num_records - window * size)
    rest = window * size + order.permutation(window, held)[offset:]
    assert shuffled(order, num_records)[position : (window + 1) * size] == rest.tolist()


def test_the_same_again_but_another_for_each_window_epoch_seed_and_purpose() -> None:
    order = WindowOrder(Shuffle(window=50), seed=3, epoch=4)
    reference = order.permutation(5, 50)
    assert reference.dtype == np.int64
    assert np.array_equal(WindowOrder(Shuffle(window=50), 3, 4).permutation(5, 50), reference)
    assert np.array_equal(WindowOrder(Shuffle(window=50, seed=3), 9, 4).permutation(5, 50), reference)
    others = [
        order.permutation(6, 50),
        WindowOrder(Shuffle(window=50), 4, 4).permutation(5, 50),
        WindowOrder(Shuffle(window=50, seed=4), 3, 4).permutation(5, 50),
        WindowOrder(Shuffle(window=50), 3, 5).permutation(5, 50),
        WindowOrder(Shuffle(window=50), 3, 4, "lane 1").permutation(5, 50),
    ]
    assert all((other == reference).mean() < 0.2 for other in others)


def test_a_window_of_one_keeps_the_order() -> None:
    assert shuffled(WindowOrder(Shuffle(window=1), 0, 0), 9) == list(range(9))


def test_golden_numbers() -> None:
    assert shuffled(WindowOrder(Shuffle(window=6), seed=0, epoch=0), 15) == [0, 5, 3, 1, 4, 2, 10, 8, 6, 9, 11, 7, 14, 12, 13]


def test_more_records_than_a_window_holds_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="num_records = 7"):
        WindowOrder(Shuffle(window=6), 0, 0).permutation(0, 7)
