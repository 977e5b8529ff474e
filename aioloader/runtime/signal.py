"""A signal: wakes everybody who waits now, remembers nothing."""

from __future__ import annotations

import anyio

__all__ = ["Signal"]


class Signal:
    """Wait for a change of state that is checked before and after: `while not ready(): await signal.wait()`."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Wake all who wait now."""
        event, self._event = self._event, anyio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._event.wait()
