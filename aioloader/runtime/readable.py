"""Waiting for a socket in an asyncio loop, which keeps watching it between waits: asking it anew each time costs 20 us."""

from __future__ import annotations

import asyncio
import socket

__all__ = ["ReadableSocket"]


class ReadableSocket:
    """One task at a time waits until the socket is readable, or closed by this end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.loop = loop
        self._descriptor = sock.fileno()
        self._waiter: asyncio.Future[None] | None = None
        self._is_watched = False

    async def wait(self) -> None:
        """Wait; return at once when closed."""
        if self._descriptor < 0:
            return
        self._waiter = self.loop.create_future()
        if not self._is_watched:
            self._is_watched = True
            self.loop.add_reader(self._descriptor, self._wake)
        await self._waiter

    def close(self) -> None:
        """Stop watching, before the socket is closed, and wake who waits."""
        is_open = not self.loop.is_closed()
        if self._is_watched and is_open:
            self.loop.remove_reader(self._descriptor)
        self._is_watched = False
        self._descriptor = -1
        if self._waiter is not None and not self._waiter.done() and is_open:
            self._waiter.set_result(None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        else:  # nobody wants to know for the moment
            self._is_watched = False
            self.loop.remove_reader(self._descriptor)
