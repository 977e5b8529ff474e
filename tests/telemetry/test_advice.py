"""Advice: more workers where they are missing, a buffer that keeps them busy, and no more of either where it gains nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader import ConfigError, suggest_async_config

times = st.floats(1e-6, 100)


def test_preprocessing_that_is_slower_than_training_gets_workers_first_and_a_buffer_for_them() -> None:
    assert suggest_async_config(0.04, 0.01).workers >= 4
    advice = suggest_async_config(0.08, 0.01, workers=4)
    assert advice.workers > 4
    assert advice.buffer_size >= advice.workers


def test_where_both_take_as_long_the_buffer_is_between_one_and_two_records_per_worker() -> None:
    assert 8 <= suggest_async_config(0.01, 0.01, workers=8).buffer_size <= 16


def test_where_training_is_slower_the_buffer_stays_near_the_workers() -> None:
    advice = suggest_async_config(0.001, 0.05, workers=8)
    assert (advice.workers, advice.buffer_size) == (8, 8)


@given(preprocess_s=times, train_s=times, workers=st.integers(1, 64))
def test_advice_keeps_the_trainer_busy_and_takes_no_worker_away(preprocess_s: float, train_s: float, workers: int) -> None:
    advice = suggest_async_config(preprocess_s, train_s, workers=workers)
    assert advice.workers >= workers
    assert advice.workers * train_s >= preprocess_s * 0.999
    assert advice.workers <= advice.buffer_size <= 2 * advice.workers


@pytest.mark.parametrize(("preprocess_s", "train_s", "workers"), [(0, 1, 1), (1, 0, 1), (1, -1, 1), (float("nan"), 1, 1), (1, 1, 0)])
def test_what_was_not_measured_is_refused(preprocess_s: float, train_s: float, workers: int) -> None:
    with pytest.raises(ConfigError, match=r"suggest_async_config"):
        suggest_async_config(preprocess_s, train_s, workers=workers)
