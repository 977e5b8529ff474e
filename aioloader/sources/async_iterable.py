"""A source made of any async iterable, or of an async generator function."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Mapping

from aioloader.protocols import Cursor, Json, Record
from aioloader.sources.origin import ASYNC, Origin, describe
from aioloader.sources.stream import AsyncStreamReader, AsyncUpstream

__all__ = ["AsyncIterableSource"]


class AsyncIterableSource:
    """The records of an async iterable in its own order; record ids are (name, running number).

    State, epoch and reuse are as in `IterableSource`. Records are awaited one by one in the loop that reads, under asyncio and
    trio; a record once asked for is always waited for.

    Args:
        iterable: An async iterable whose order is stable, or a function without arguments that returns one (an async generator
            function) and is called for each pass. An async generator can be read once.
        name: The shard part of the record ids.

    Raises:
        ConfigError: `iterable` is something else.
    """

    def __init__(self, iterable: AsyncIterable[Record] | Callable[[], AsyncIterable[Record]], name: str = "async_iterable") -> None:
        self._origin = Origin(ASYNC, iterable)
        self._name = name

    def __repr__(self) -> str:
        return f"AsyncIterableSource({describe(self._origin.upstream)}, name={self._name!r})"

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the name of the source and of what it reads."""
        return {"kind": "async_iterable", "name": self._name, "of": describe(self._origin.upstream)}

    def open(self, epoch: int, cursor: Cursor | None) -> AsyncStreamReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`.

        Raises:
            ConfigError: The upstream is an async iterator that was opened before.
            ResumeError: The cursor does not belong to this source.
        """

        def begin(state: Json | None) -> AsyncUpstream:
            iterator, snapshot = self._origin.begin(epoch, state)
            return AsyncUpstream(iterator=iterator, snapshot=snapshot, aclose=self._origin.closing(iterator))

        reader = AsyncStreamReader(self._name, begin, cursor)
        self._origin.claim()
        return reader
