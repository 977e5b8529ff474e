"""An opened source, or one rank's share of it: blocking readers run in a thread of their own, asynchronous ones in the engine's loop."""

from __future__ import annotations

import inspect
from typing import Any

import anyio

from aioloader.protocols import AsyncReader, Cursor, DealtSource, Reader, Share, Source, Span
from aioloader.runtime.threads import CallThread

__all__ = ["Reading", "open_share"]


class Reading:
    """A reader that can be awaited, whatever its kind."""

    def __init__(self, reader: Reader | AsyncReader, thread: CallThread | None) -> None:
        self._reader: Any = reader
        self._thread = thread

    @classmethod
    async def open(cls, source: Source, epoch: int, cursor: Cursor | None, share: Share) -> Reading:
        """Open a source for one pass. Raises what the source raises."""
        thread = CallThread("aioloader-source")
        try:
            reader = await thread.call(open_share, source, epoch, cursor, share)
        except BaseException:
            thread.stop()
            raise
        if inspect.iscoroutinefunction(reader.read):
            thread.stop()
            return cls(reader, None)
        return cls(reader, thread)

    async def read(self, max_records: int) -> tuple[Cursor | None, Span | None]:
        """Return the cursor before the read and what was read."""
        if self._thread is None:
            at = self._reader.cursor()
            return at, await self._reader.read(max_records)
        return await self._thread.call(_read, self._reader, max_records)

    async def close(self) -> None:
        """Close the reader; one that is blocked in its thread for ever is left there, a daemon."""
        if self._thread is None:
            with anyio.move_on_after(1):
                await self._reader.aclose()
            return
        thread = self._thread
        with anyio.move_on_after(1):
            await thread.call(self._reader.close)
        thread.stop()


def open_share(source: Source, epoch: int, cursor: Cursor | None, share: Share) -> Reader | AsyncReader:
    """Return a reader of the share alone, where the source is a `DealtSource`, else of everything."""
    if isinstance(source, DealtSource):
        return source.open_share(epoch, cursor, share)
    return source.open(epoch, cursor)


def _read(reader: Reader, max_records: int) -> tuple[Cursor | None, Span | None]:
    return reader.cursor(), reader.read(max_records)
