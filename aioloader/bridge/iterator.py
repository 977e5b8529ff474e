"""The iterator of one pass, for `for` and `async for` alike: takes what the engine has ready, or waits for its descriptor.

No helper thread and no call into another event loop: the trainer reads the engine's socket itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import anyio
from anyio.lowlevel import checkpoint

from aioloader.bridge.batch import Batch
from aioloader.bridge.feed import Engine, Feed, InlineFeed
from aioloader.engine.channel import Delivered
from aioloader.engine.host import Ended, HostDied
from aioloader.engine.output import Ready
from aioloader.errors import ClosedError, SynchronizationError
from aioloader.protocols import Json
from aioloader.telemetry.waits import CAUSES, CONSUMER, RANKS, Waits

if TYPE_CHECKING:  # these import torch
    from aioloader.bridge.matching import Matching
    from aioloader.bridge.relay import Sender

__all__ = ["BatchIterator"]

_CHECK_PAUSE_S = 0.002
_TURN_EVERY_S = 0.005  # as threads give way; a turn of the event loop costs more than all the rest of a hand-over


@runtime_checkable
class _RanksFeed(Protocol):
    """A feed that other ranks have a say in."""

    awaits_ranks: bool

    def pause_s(self) -> float:
        """Return how long to sleep before asking again; longer each time."""


@runtime_checkable
class _AgreedFeed(Protocol):
    """A feed of an engine of this rank, up to the end that all ranks have agreed on."""

    engine: Engine
    has_awaited_engine: bool


class BatchIterator:
    """One pass of a loader. Ends with the pass, with `close`, or when it is no longer referenced."""

    def __init__(
        self,
        feed: Feed,
        state: Json,
        matching: Matching | None = None,
        sender: Sender | None = None,
        *,
        open_batch: Callable[[Ready | Delivered, Any], Batch],
        on_end: Callable[[BatchIterator, Json], None],
        on_leave: Callable[[BatchIterator], None],
        on_death: Callable[[BatchIterator, HostDied], Engine],
    ) -> None:
        self._feed = feed
        self._agreed = feed if isinstance(feed, _AgreedFeed) else None
        self._from_ranks = feed if isinstance(feed, _RanksFeed) else None
        self._open_batch = open_batch
        self._matching = matching
        self._sender = sender
        self._awaits_check = False
        self._base = state
        self._load_last: Callable[[], Json] | None = None
        self._end_state: Json = None
        self._on_end = on_end
        self._on_leave = on_leave
        self._on_death = on_death
        self._owner_pid = os.getpid()
        self._over: BaseException | None = None
        self._is_waiting = False
        self._num_batches = 0
        self._turned_s = -_TURN_EVERY_S
        """When the event loop last had a turn while this iterator was asked for a batch."""
        self._num_samples = 0
        self._left_s: float | None = None
        self._away_s = 0.0
        self._waits = Waits()

    def __iter__(self) -> BatchIterator:
        """Return the iterator itself."""
        return self

    def __aiter__(self) -> BatchIterator:
        """Return the iterator itself."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch, waiting for it.

        Raises:
            AioLoaderError: A stage failed; everything before the failing record was delivered. Raised again by every later call.
        """
        started = time.perf_counter()
        try:
            self._check()
            waited = False
            while (delivered := self._receive()) is None:
                waited = True
                self._wait_blocking()
        except Ended as end:
            self._finish(end)
            raise StopIteration from None
        except BaseException as error:
            self.close(_lasting(error))
            raise
        return self._deliver(delivered, started, waited=waited)

    async def __anext__(self) -> Batch:
        """Return the next batch, waiting for it in the caller's event loop (asyncio or trio). Raises as `__next__`.

        Where it is there already, the loop gets a turn if the last one that this iterator gave it was 5 ms ago.
        """
        started = time.perf_counter()
        try:
            if started - self._turned_s >= _TURN_EVERY_S or self._inline is not None:
                await checkpoint()  # else a trainer whose batches are always there could neither be cancelled nor share its loop
                self._turned_s = time.perf_counter()
            self._check()
            waited = False
            while (delivered := self._receive()) is None:
                waited = True
                await self._wait()
                self._turned_s = time.perf_counter()
                self._check()
        except Ended as end:
            self._finish(end)
            raise StopAsyncIteration from None
        except BaseException as error:
            self.close(_lasting(error))
            raise
        return self._deliver(delivered, started, waited=waited)

    def state(self) -> Json:
        """Return the state as of the last delivered batch."""
        if self._end_state is not None:
            return self._end_state
        return self._base if self._load_last is None else {**self._base, **self._load_last()}

    @property
    def num_batches(self) -> int:
        """Return the batches delivered so far."""
        return self._num_batches

    def stats(self) -> dict[str, Any]:
        """Return the numbers of the trainer's side: batches, how long it waited for them and for what, and how long it was away."""
        own = {} if self._inline is None else self._inline.stats()
        return {
            **own,
            "delivered_batches": self._num_batches,
            "mean_train_s": self._away_s / max(1, self._num_samples),
            "consumer_wait_s": self._waits.total_s,
            "waits": self._waits.snapshot(),
        }

    def look_again(self) -> None:
        """Let a task that waits look again: what it waits for may have been received for it, and its descriptor stay quiet."""
        if self._is_waiting:
            with contextlib.suppress(anyio.NoEventLoopError):
                anyio.notify_closing(self._feed.fileno())

    def close(self, reason: BaseException | None = None) -> None:
        """Leave the pass; later calls raise `reason`, or `ClosedError`. Safe to call twice."""
        if self._over is not None:
            return
        self._over = reason or ClosedError("iterator: expected an open iterator, got one that was closed; start a new loop.")
        self.look_again()
        if self._inline is not None:
            self._inline.close()
        if self._sender is not None:
            self._sender.fail(None if isinstance(reason, ClosedError) else reason)
        if self._matching is not None and reason is not None and not isinstance(reason, ClosedError | SynchronizationError):
            self._matching.fail()
        self._on_leave(self)

    def __del__(self) -> None:
        """Leave the pass when the loop was left early."""
        if self._over is None and self._owner_pid == os.getpid():
            with contextlib.suppress(Exception):  # at interpreter exit parts of the module may be gone
                self.close()

    def _check(self) -> None:
        if self._over is not None:
            raise self._over
        if self._owner_pid != os.getpid():
            raise ClosedError("iterator: expected the process that made it, got one forked from that; start a new loop here.")

    def _receive(self) -> Ready | Delivered | None:
        """Return the next micro-batch if it is there. A host that died is replaced by one that goes on from the last state."""
        self._awaits_check = self._matching is not None and self._matching.is_overdue
        if self._awaits_check:
            return None
        try:
            received = self._feed.try_receive()
            return received if received is None or self._sender is None else self._sender.send(received)
        except HostDied as death:
            engine = self._on_death(self, death)
            if self._agreed is None:
                self._feed = engine
            else:
                self._agreed.engine = engine
            return None

    @property
    def _inline(self) -> InlineFeed | None:
        feed = self._feed if self._agreed is None else self._agreed.engine
        return feed if isinstance(feed, InlineFeed) else None

    def _wait_blocking(self) -> None:
        """Wait for the engine or for other ranks."""
        if self._awaits_check and self._matching is not None:
            self._matching.wait()
        else:
            self._feed.wait()

    async def _wait(self) -> None:
        """Wait for the engine or for other ranks."""
        if self._awaits_check:
            await anyio.sleep(_CHECK_PAUSE_S)
        elif self._from_ranks is not None and self._from_ranks.awaits_ranks:
            await anyio.sleep(self._from_ranks.pause_s())
        elif self._inline is not None:
            self._inline.wait()
        else:
            await self._wait_readable()

    async def _wait_readable(self) -> None:
        """Wait until there is something to receive, or until another task closes this iterator or lets it look again."""
        self._is_waiting = True
        try:
            await anyio.wait_readable(self._feed.fileno())
        except anyio.ClosedResourceError:
            self._check()
        finally:
            self._is_waiting = False

    def _finish(self, end: Ended) -> None:
        end.__traceback__ = None  # its frames hold the loader and the trainer's loop, which would wait for the garbage collector
        if self._over is None:
            self._over = end
            self._end_state = end.state
            try:
                if self._sender is not None:
                    self._sender.end(end.state)
            except SynchronizationError:
                self._on_leave(self)
                raise
            self._on_end(self, end.state)

    def _deliver(self, delivered: Ready | Delivered, started: float, *, waited: bool) -> Batch:
        self._num_batches += 1
        self._feed.taken()
        batch = self._open_batch(delivered, self._base)
        self._load_last = delivered.state_loader()
        self._num_samples += batch.num_samples
        cause = CONSUMER
        if waited:
            cause = self._cause(delivered)
            batch.wait_cause = CAUSES[cause]
        now = time.perf_counter()
        if self._left_s is not None:
            self._away_s += started - self._left_s
        self._left_s = now
        batch.wait_s = now - started
        self._waits.add(cause, batch.wait_s)
        if self._matching is not None:
            self._matching.note(batch)
        return batch

    def _cause(self, delivered: Ready | Delivered) -> int:
        """Return what a micro-batch was waited for."""
        return delivered.cause if self._agreed is None or self._agreed.has_awaited_engine else RANKS


def _lasting(error: BaseException) -> Exception:
    """Return what later calls raise: an error again, but neither a cancellation nor a Ctrl-C, which were meant once."""
    if isinstance(error, Exception):
        return error
    return ClosedError(
        f"iterator: expected one that was not interrupted, got one whose last wait ended by {type(error).__name__}; start a new loop."
    )
