"""A source made of any iterable, or of a function that returns one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from aioloader.protocols import Cursor, Json, Record
from aioloader.sources.origin import SYNC, Origin, describe
from aioloader.sources.stream import StreamReader, Upstream

__all__ = ["IterableSource"]


class IterableSource:
    """The records of an iterable in its own order; record ids are (name, running number).

    Where the iterable, or else its iterator, has `state_dict` and `load_state_dict`, the cursor holds that state and resuming is
    as cheap as the iterable makes it. Any other is read from its beginning, and the records before the cursor are dropped.
    `set_epoch(epoch)` is called before each pass where the iterable has it. Have one reader at a time.

    Args:
        iterable: An iterable whose order is stable, or a function without arguments that returns one and is called for each
            pass. A generator or other iterator can be read once.
        name: The shard part of the record ids.

    Raises:
        ConfigError: `iterable` is something else, or text or a mapping.
    """

    def __init__(self, iterable: Iterable[Record] | Callable[[], Iterable[Record]], name: str = "iterable") -> None:
        self._origin = Origin(SYNC, iterable)
        self._name = name

    def __repr__(self) -> str:
        return f"IterableSource({describe(self._origin.upstream)}, name={self._name!r})"

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the name of the source and of what it reads."""
        return {"kind": "iterable", "name": self._name, "of": describe(self._origin.upstream)}

    def preview_order(self, epoch: int) -> Json:
        """Return what the upstream says an epoch begins with, for ranks to compare; None if it says nothing."""
        look = getattr(self._origin.upstream, "preview_order", None)
        return look(epoch) if callable(look) else None

    def open(self, epoch: int, cursor: Cursor | None) -> StreamReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`.

        Raises:
            ConfigError: The upstream is an iterator that was opened before.
            ResumeError: The cursor does not belong to this source.
        """

        def begin(state: Json | None) -> Upstream:
            iterator, snapshot = self._origin.begin(epoch, state)
            return Upstream(iterator=iterator, snapshot=snapshot, close=self._origin.closing(iterator))

        reader = StreamReader(self._name, begin, cursor)
        self._origin.claim()
        return reader
