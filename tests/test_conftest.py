"""The guard that every other test relies on, tried on tests that misbehave."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

LEAKING = """
import os, subprocess, threading

def test_process():
    subprocess.Popen(["sleep", "3"])

def test_thread():
    threading.Timer(3, print).start()

def test_descriptor():
    os.open("/dev/null", os.O_RDONLY)

def test_clean():
    threading.Timer(0.01, print).start()
"""


def test_tests_that_leave_something_behind_fail(tmp_path: Path) -> None:
    guard = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(guard.replace("CLOSE_WITHIN_S = 2.0", "CLOSE_WITHIN_S = 0.2"))
    (tmp_path / "test_leaking.py").write_text(LEAKING)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "4 passed, 3 errors" in done.stdout, done.stdout + done.stderr
    for kind, held in {"processes": "sleep", "threads": "Thread-", "descriptors": "/dev/null"}.items():
        assert re.search(rf"left behind after 0.2 s: {kind}: \d+ \({held}", done.stdout)


async def test_async_tests_run_under_the_loop_they_are_named_after(request: pytest.FixtureRequest) -> None:
    loop = asyncio.get_running_loop()
    assert f"[{type(loop).__module__.partition('.')[0]}]" in request.node.name
