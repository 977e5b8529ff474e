"""Async tests run under both event loops, and no test may leave anything behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings

from aioloader.testing.leaks import resources, wait_until_clean

CLOSE_WITHIN_S = 2.0

# A busy machine is slow without being wrong; each test has its timeout.
settings.register_profile("aioloader", deadline=None, print_blob=True)
settings.load_profile("aioloader")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if Path(__file__).with_name("order") in item.path.parents:  # waits for sources only, whose own tests run under both
        return {"asyncio": asyncio.new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_itemcollected(item: pytest.Item) -> None:
    own = item.get_closest_marker("timeout")
    if own is not None and own.args[0] > float(item.config.getini("timeout")):  # given by position, everywhere
        item.add_marker("long")


def pytest_sessionstart(session: pytest.Session) -> None:
    # The first uvloop loop of a process opens a pipe that stays open; it is no test's fault.
    uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves a process, a thread or an open descriptor behind for longer than two seconds."""
    before = resources()
    yield
    left = wait_until_clean(before, timeout_s=CLOSE_WITHIN_S)
    if left.count:
        pytest.fail(f"left behind after {CLOSE_WITHIN_S} s: {left}", pytrace=False)
