"""Batches taken ahead: same order, state as of the batch in hand, failures in their place. CUDA has a script of its own, gpu_check.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from aioloader import FixedBatch, Loader, StackCollator
from aioloader.errors import ConfigError
from aioloader.training.device_prefetch import DevicePrefetcher
from tests.training.fake_loader import FakeBatch, FakeLoader, language_batches


class Upstream:
    """Counts what is taken out of it, fails after `good` batches, and notes whether it was closed."""

    def __init__(self, good: int, failure: BaseException | None = None) -> None:
        self.good = good
        self.failure = failure
        self.num_taken = 0
        self.num_closed = 0

    def __iter__(self) -> Iterator[FakeBatch]:
        return self

    def __next__(self) -> FakeBatch:
        if self.num_taken == self.good:
            raise self.failure or StopIteration
        self.num_taken += 1
        return FakeBatch({"x": torch.tensor(self.num_taken)}, index=self.num_taken)

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_order_and_end_are_kept(depth: int) -> None:
    found = [batch.index for batch in DevicePrefetcher(Upstream(4), "cpu", depth=depth)]
    assert found == [1, 2, 3, 4]


def test_depth_is_how_many_are_ahead() -> None:
    upstream = Upstream(100)
    batches = DevicePrefetcher(upstream, "cpu", depth=3)
    ahead = []
    for batch in islice(batches, 6):
        ahead.append(upstream.num_taken - batch.index)
        assert batches.num_ahead == ahead[-1]
    assert ahead == [1, 2, 3, 3, 3, 3]  # the first one waits for one more, not for three


def test_the_cpu_takes_nothing_ahead() -> None:
    upstream = Upstream(3)
    assert next(DevicePrefetcher(upstream, "cpu")).index == upstream.num_taken == 1


def test_a_failure_keeps_its_place() -> None:
    batches = DevicePrefetcher(Upstream(3, OSError("the upstream failed")), "cpu", depth=2)
    assert [next(batches).index for _ in range(3)] == [1, 2, 3]
    with pytest.raises(OSError, match="the upstream failed"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_an_interrupt_comes_at_once() -> None:
    batches = DevicePrefetcher(Upstream(1, KeyboardInterrupt("now")), "cpu", depth=2)
    with pytest.raises(KeyboardInterrupt, match="now"):
        next(batches)


def test_closing_early_leaves_the_iterator_and_ends() -> None:
    upstream = Upstream(100)
    batches = DevicePrefetcher(upstream, "cpu", depth=2)
    next(batches)
    batches.close()
    batches.close()
    assert (upstream.num_closed, batches.num_ahead) == (1, 0)
    with pytest.raises(StopIteration):
        next(batches)


def test_the_state_is_that_of_the_batch_in_hand() -> None:
    whole = FakeLoader(language_batches(8), 1)
    batches = DevicePrefetcher(whole, "cpu", depth=3)
    trained = [next(batches) for _ in range(3)][-1]
    resumed = FakeLoader(language_batches(8), 1)
    resumed.load_state_dict(whole.state_dict(after=trained))
    assert [batch.index for batch in resumed] == [3, 4, 5, 6, 7]


def numbers_after(state: Any, count: int) -> list[int]:
    with make_loader() as loader:
        loader.load_state_dict(state)
        return [int(batch["x"][0]) for batch in islice(loader, count)]


def make_loader() -> Loader:
    return Loader([{"x": number} for number in range(20)], batch=FixedBatch(2), collate=StackCollator(), workers=0)


def test_the_real_loader_goes_on_after_the_batch_in_hand() -> None:
    with make_loader() as loader:
        batches = DevicePrefetcher(loader, "cpu", depth=2)
        taken = [next(batches) for _ in range(4)]
        assert batches.num_ahead == 2
        assert [int(batch["x"][0]) for batch in taken] == [0, 2, 4, 6]
        state = loader.state_dict(after=taken[-1])
        batches.close()
    assert numbers_after(state, 2) == [8, 10]


def test_depth_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"DevicePrefetcher\(depth=\): expected 0 or more, got -1"):
        DevicePrefetcher([], "cpu", depth=-1)
