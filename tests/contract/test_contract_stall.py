"""A pass that does not get on says which stage stands still and where each worker stands."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from aioloader import FixedBatch, Loader, StallError
from aioloader.engine.watchdog import Facts, Watchdog
from tests.contract.cases import PROCESSES, SIDECAR_THREADS, Options, collate, drain, name_of


def stand_still_at_20(number: int) -> int:
    while number == 20:
        time.sleep(0.01)
    return number


@pytest.mark.parametrize("options", [PROCESSES, SIDECAR_THREADS], ids=name_of)
def test_a_stalled_worker_is_named_with_its_stack(options: Options) -> None:
    """With room for two records in flight each travels alone, so that none shares the fate of the one that stands still."""
    stall: Options = {"stall_timeout_s": 2.0, "raise_on_stall": True}
    with Loader(range(60), preprocess=stand_still_at_20, batch=FixedBatch(1), collate=collate, buffer_size=2, **stall, **options) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(20))
    assert isinstance(error, StallError)
    assert error.stage == "preprocess"
    assert "stage preprocess does not get on" in str(error)
    assert "in stand_still_at_20" in str(error)


def dries_up() -> Iterator[int]:
    yield 0
    time.sleep(30)


def test_a_stalled_source_is_named_with_its_stack(capfd: pytest.CaptureFixture[str]) -> None:
    stall: Options = {"stall_timeout_s": 2.0, "raise_on_stall": True}
    with Loader(dries_up, batch=FixedBatch(1), collate=collate, workers=1, **stall) as loader:
        delivered, error = drain(loader)
    assert delivered == [0], "what comes before a pause is not held back by it"
    assert isinstance(error, StallError)
    assert error.stage == "source"
    assert "in dries_up" in str(error)
    assert capfd.readouterr().err.count("stage source does not get on") == 1


def test_a_trainer_that_takes_its_time_is_no_stall(capfd: pytest.CaptureFixture[str]) -> None:
    with Loader(range(20), batch=FixedBatch(1), collate=collate, workers=1, stall_timeout_s=2.0, raise_on_stall=True) as loader:
        for batch in loader:
            if batch.step == 3:
                time.sleep(3.5)
    assert "no progress" not in capfd.readouterr().err


def facts(progress: int, *, is_consumer_bound: bool = False) -> Facts:
    return Facts((progress,), is_consumer_bound, is_reading=False, num_running=1, is_collating=False)


def test_the_watchdog_counts_from_the_last_progress() -> None:
    watchdog = Watchdog(10, now_s=0)
    assert watchdog.look(facts(1), 5) is None
    assert watchdog.look(facts(1), 14) is None
    assert watchdog.look(facts(1), 16) == 11
    assert watchdog.look(facts(1), 20) is None, "said once"
    assert watchdog.look(facts(1, is_consumer_bound=True), 30) is None
    assert watchdog.look(facts(1), 39) is None
    assert watchdog.look(facts(2), 41) is None
    assert watchdog.look(facts(2), 51) == 10
