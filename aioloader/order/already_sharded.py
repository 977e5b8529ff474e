"""A stream that is split already: every rank gives records of its own, and nothing is left out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from aioloader.protocols import AsyncReader, Cursor, Json, Reader, Share, Source, Span

__all__ = ["AlreadySharded", "SplitStream"]


class AlreadySharded:
    """Says that a source gives other records on each data-parallel rank: it reads a part that was split off for that rank.

    Without it every rank is taken to read the same stream, and leaves out what belongs to others. A run on such a source goes on with the
    same number of ranks only: nobody knows how the data would be split for another one.

    Args:
        source: What `Loader` takes as a source.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    def __repr__(self) -> str:
        return f"AlreadySharded({self.source!r})"


class SplitStream:
    """The stream of one rank, whose n-th record stands at the rank's n-th position."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def fingerprint(self) -> Mapping[str, Json]:
        """Return that of the source on this rank, and that it is split."""
        return {"kind": "already_sharded", "source": dict(self._source.fingerprint())}

    def preview_order(self, epoch: int) -> Json:
        """Return what an epoch begins with on this rank, None if the source does not say."""
        look = getattr(self._source, "preview_order", None)
        return look(epoch) if callable(look) else None

    def open(self, epoch: int, cursor: Cursor | None) -> Reader | AsyncReader:
        """Return a reader of this rank's records, one position each; see `aioloader.protocols.Source.open`."""
        return self._source.open(epoch, cursor)

    def open_share(self, epoch: int, cursor: Cursor | None, share: Share) -> Reader | AsyncReader:
        """Return a reader of this rank's records; see `aioloader.protocols.DealtSource.open_share`."""
        reader: Any = self._source.open(epoch, cursor)
        return _AsyncSplitReader(reader, share) if inspect.iscoroutinefunction(reader.read) else _SplitReader(reader, share)


class _SplitReader:
    def __init__(self, reader: Reader, share: Share) -> None:
        self._reader = reader
        self._share = share
        self.cursor = reader.cursor
        self.close = reader.close

    def read(self, max_records: int) -> Span | None:
        return _spread(self._reader.read(max_records), self._share)


class _AsyncSplitReader:
    def __init__(self, reader: AsyncReader, share: Share) -> None:
        self._reader = reader
        self._share = share
        self.cursor = reader.cursor
        self.aclose = reader.aclose

    async def read(self, max_records: int) -> Span | None:
        return _spread(await self._reader.read(max_records), self._share)


def _spread(span: Span | None, share: Share) -> Span | None:
    """Return a span whose records stand at every so-manieth position."""
    return None if span is None else Span(span.records, span.ids, len(span.records) * share.count)
