"""`import aioloader` starts nothing and loads nothing heavy."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

PROBE = """
import time
started = time.perf_counter()
import aioloader
elapsed_s = time.perf_counter() - started
import json, logging, sys
modules = sorted(sys.modules)
from aioloader.testing import resources
held = resources()
print(json.dumps({
    "elapsed_s": elapsed_s,
    "modules": modules,
    "processes": sorted(held.processes),
    "threads": [name for _, name in held.threads],
    "log_handlers": len(logging.getLogger().handlers) + len(logging.getLogger("aioloader").handlers),
}))
"""
HEAVY = {"torch", "numpy", "anyio", "asyncio", "datasets", "transformers", "tokenizers", "pyarrow", "pandas", "ray", "aioloader_adapters"}
BUDGET_S = 1.0
"""Five times what a quiet machine may take: this finds a heavy import, it does not measure a light one."""


def probe() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False, start_new_session=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_importing_the_package_is_light() -> None:
    found = probe()
    assert not HEAVY & {name.partition(".")[0] for name in found["modules"]}
    assert found["processes"] == []
    assert found["threads"] == ["MainThread"]
    assert found["log_handlers"] == 0


def test_importing_the_package_is_quick() -> None:
    assert statistics.median(probe()["elapsed_s"] for _ in range(5)) < BUDGET_S
