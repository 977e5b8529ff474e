"""Runs in a process that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from aioloader.preprocess import Event, PreprocessOptions, preprocess

__all__ = ["kill_after", "run_forked"]


def run_forked(options: PreprocessOptions, on_event: Callable[[Event], None]) -> int:
    """Run in a child and return its wait status. It is forked, since a fresh interpreter takes seconds to import everything."""
    child = os.fork()
    if not child:
        status = 1
        try:
            preprocess(options, on_event=on_event)
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def kill_after(options: PreprocessOptions, num_events: int) -> bool:
    """Run until so many batches were written and kill it there, with SIGKILL; return whether it got so far."""
    seen = 0

    def on_event(event: Event) -> None:
        nonlocal seen
        seen += event.kind == "running"
        if seen == num_events:
            os.kill(os.getpid(), signal.SIGKILL)

    status = run_forked(options, on_event)
    assert status in (0, signal.SIGKILL), f"the run itself failed: {status}"
    return status == signal.SIGKILL
