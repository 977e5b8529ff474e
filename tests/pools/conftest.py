"""A zygote for the tests of a module: starting one for each test would cost more than the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aioloader.runtime.spawn import ZygoteProcess


@pytest.fixture(scope="module")
def zygote() -> Iterator[ZygoteProcess]:
    with ZygoteProcess() as process:
        yield process
