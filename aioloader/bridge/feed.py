"""Where an iterator gets its micro-batches from: a host, or an inline pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

from aioloader.engine.channel import Delivered
from aioloader.engine.host import Ahead, Ended
from aioloader.engine.inline import InlinePass
from aioloader.engine.output import Ready
from aioloader.engine.plan import Plan, Run
from aioloader.pools.runner import Preprocess
from aioloader.telemetry.stages import Stages

__all__ = ["Engine", "Feed", "InlineFeed"]


class Feed(Protocol):
    """Where an iterator gets its micro-batches from: a host, or an inline pass."""

    def fileno(self) -> int:
        """Return the descriptor to wait on."""

    def try_receive(self) -> Ready | Delivered | None:
        """Return the next micro-batch, None if it is not there yet; raise `Ended` at the end of the pass."""

    def wait(self) -> None:
        """Wait, blocking, until there is something to receive."""

    def taken(self) -> None:
        """Note that a micro-batch was delivered."""


class Engine(Feed, Protocol):
    """A feed that can be asked what it has."""

    def look(self) -> Ahead:
        """Return what can be received without waiting."""


class InlineFeed:
    """A pass that runs in the caller's thread, one micro-batch at a time."""

    def __init__(self, plan: Plan, run: Run, preprocess: Preprocess) -> None:
        self._plan = plan
        self._preprocess = preprocess
        self._stages = Stages()
        self._num_records = 0
        self._started_s = time.monotonic()
        self._made: Ready | Exception | None = None
        self._start(run)

    def fileno(self) -> int:
        """Return -1: there is nothing to wait on."""
        return -1

    def try_receive(self) -> Ready:
        """Return the next micro-batch, which is made now unless it was waited for."""
        made, self._made = self._made, None
        if isinstance(made, Exception):
            raise made
        return self._make() if made is None else made

    def look(self) -> Ahead:
        """Return what was waited for."""
        if isinstance(self._made, Exception):
            return Ahead(0, "end" if isinstance(self._made, Ended) else "failure")
        return Ahead(int(self._made is not None), "nothing yet")

    def wait(self) -> None:
        """Make the next micro-batch, here and now."""
        if self._made is None:
            try:
                self._made = self._make()
            except Exception as error:  # noqa: BLE001 - raised where it is received
                self._made = error

    def _make(self) -> Ready:
        while (ready := next(self._batches, None)) is None:
            following = self._pass.following()
            if following is None:
                raise Ended(self._pass.next_state)
            self._start(following)
        self._num_records = ready.num_records
        return ready

    def taken(self) -> None:
        """Free the micro-batch's place in the in-flight budget."""
        self._pass.slots.deliver(self._num_records)

    def close(self) -> None:
        """Close the source."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def _start(self, run: Run) -> None:
        self._pass = InlinePass(self._plan, run, self._preprocess, self._stages)
        self._batches: Iterator[Ready] = iter(self._pass)

    def stats(self) -> dict[str, Any]:
        """Return the numbers of the pass."""
        slots = self._pass.slots
        return {
            "stages": self._stages.snapshot(time.monotonic() - self._started_s),
            "in_flight": slots.in_flight,
            "peak_in_flight": slots.peak,
            "workers": 0,
        }
