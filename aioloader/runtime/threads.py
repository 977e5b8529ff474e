"""A daemon thread that runs blocking calls one after another for an event loop.

Sources must be read from one and the same thread, and a source that blocks for ever must not keep the process alive; thread
pools of the standard library and of anyio give neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, Unpack

__all__ = ["CallThread"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class CallThread:
    """One daemon thread. Calls run in the order in which they were made; a cancelled caller leaves its call running."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """Run `function(*args)` in the thread and return its result or raise its exception.

        Raises:
            RuntimeError: It raised what is no `Exception` (that is the cause), or the thread was stopped.
        """
        if self._stopped:
            raise RuntimeError(f"CallThread {self._thread.name}: expected calls before stop, got one after it; start another thread.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = function(*args)
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                _tell(loop, _fail, future, error)
            else:
                _tell(loop, _finish, future, result)

        self._calls.put(run)
        return await future

    def stop(self) -> None:
        """Let the thread end after the calls already made; does not wait."""
        self._stopped = True
        self._calls.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return False if it still runs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it was given is not kept until the next one comes


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], future: asyncio.Future[Any], value: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(function, future, value)


def _finish(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            # Some would stop the loop, some would be taken for a cancellation, and a future refuses a StopIteration.
            wrapped = RuntimeError(f"{type(error).__name__} left a blocking call: {error!r}")
            wrapped.__cause__ = error
            error = wrapped
        future.set_exception(error)
