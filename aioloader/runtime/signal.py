"""A signal: wakes everybody who waits now, remembers nothing."""

from __future__ import annotations

import asyncio

__all__ = ["Signal"]


class Signal:
    """Wait for a change of state that is checked before and after: `while not ready(): await signal.wait()`.

    For the engine's loop, which is always asyncio's. Notifying costs nothing while nobody waits, which is nearly always.
    """

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def has_waiters(self) -> bool:
        """Return whether anybody waits."""
        return bool(self._waiters)

    def notify(self) -> None:
        """Wake all who wait now."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
