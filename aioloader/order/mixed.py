"""A mixture as one stream: the drawer says which source the record of each position comes from, the children give the records.

    drawer     w w c w w c w ...        a block of positions at once
    children   web  |###---|            read ahead as many records as the block wants
               code |##|                out of records: the draws from here on are taken back, and `exhausted` says what to do

Streams are read by every rank, and the records of other ranks left out; of indexed sources each rank fetches its own records only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioloader.errors import ClosedError, ResumeError, SourceError
from aioloader.order.adoption import adopt
from aioloader.order.child import Child, IndexedChild, Row, StreamChild
from aioloader.order.drawer import RecordDrawer, TokenDrawer
from aioloader.order.mixture import Mixture
from aioloader.order.ordered import OrderedIndex, order_source
from aioloader.order.schedule import Ramp, Steps
from aioloader.order.shuffle import Shuffle
from aioloader.protocols import Cursor, Json, Record, RecordId, Share, Source, Span

__all__ = ["MixedStream"]

_KEYS = {"drawer", "children"}
_BLOCK = 4096
"""Positions drawn at once at most: with many ranks, a block of one rank's records spans many positions."""


class MixedStream:
    """The records of a mixture in its order, each source in the order that `shuffle` gives it.

    Ids of records are (name of the source / shard, row). The cursor holds the drawer's state and, for each source, a cursor of its own.

    Args:
        mixture: The options.
        sources: The sources by name, resolved.
        shuffle: Shuffles each source by itself.
        seed: The loader's.
    """

    def __init__(self, mixture: Mixture, sources: Mapping[str, Source], shuffle: Shuffle | None, seed: int) -> None:
        self._mixture = mixture
        self._sources = {name: order_source(source, shuffle, seed, name) for name, source in sources.items()}

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the options of the mixture, with the fingerprint of each source by name."""
        own = self._mixture.fingerprint()
        return {
            **own,
            "sources": {name: dict(source.fingerprint()) for name, source in self._sources.items()},
            "names": list(self._sources),
        }

    def adopt(self, cursor: Cursor, saved: Json, until: int) -> Cursor:
        """Return a cursor of another mixture as one of this: from position `until` on this one is drawn, before it still the other.

        Args:
            cursor: What was saved.
            saved: The fingerprint of the mixture that it was saved with.
            until: A position that no lane of any rank has reached.

        Raises:
            ResumeError: The other mixture has sources that this one has not, or weighs by something else.
        """
        gone = [(f"source {name!r} of the mixture", "present", "absent") for name in saved["names"] if name not in self._sources]
        if saved["weigh"] != self._mixture.weigh:
            gone.append(("weigh of the mixture", saved["weigh"], self._mixture.weigh))
        if gone:
            raise ResumeError(gone, do="keep a source that is to go, with the weight 0: records of it may be needed once more")
        at = cursor if cursor is not None else {"drawer": None, "children": {}}
        options = {name: saved[name] for name in ("names", "points", "schedule", "unit", "weigh", "stop", "repeats")}
        return {**at, "before": {"until": until, "mixture": options}}

    def open(self, epoch: int, cursor: Cursor | None) -> _MixedReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`."""
        return self.open_share(epoch, cursor, Share())

    def open_share(self, epoch: int, cursor: Cursor | None, share: Share) -> _MixedReader:
        """Return a reader of one rank's share; see `aioloader.protocols.DealtSource.open_share`."""
        if cursor is not None and not (isinstance(cursor, Mapping) and cursor.keys() >= _KEYS):
            difference = ("cursor of the mixture", cursor, "drawer and children")
            raise ResumeError([difference], do="load the state into a loader of the same mixture")
        saved = cursor or {"drawer": None, "children": {}}
        before = saved.get("before")
        mixture = self._mixture if before is None else _mixture_of(before["mixture"], self._mixture)
        drawer = _drawer(mixture, saved["drawer"])
        passes = dict(zip(mixture.names, drawer.passes, strict=True))
        children = {name: self._child(name, epoch + passes.get(name, 0), saved["children"].get(name)) for name in self._sources}
        reader = _TokenReader if isinstance(drawer, TokenDrawer) else _RecordReader
        return reader(children, drawer, share, mixture, None if before is None else _Change(before, self._mixture))

    def _child(self, name: str, epoch: int, at: Cursor | None) -> Child:
        source = self._sources[name]
        if isinstance(source, OrderedIndex) and self._mixture.weigh == "records":  # a length is known only to who reads the record
            return IndexedChild(name, source, epoch, at)
        return StreamChild(name, source, epoch, at)


@dataclass(frozen=True, slots=True)
class _Change:
    """What is to be drawn from a position on: the cursor's note of it, and the mixture."""

    note: Json
    mixture: Mixture

    @property
    def until(self) -> int:
        return int(self.note["until"])


def _drawer(mixture: Mixture, state: Json | None) -> RecordDrawer | TokenDrawer:
    return TokenDrawer(mixture, state) if mixture.weigh == "tokens" else RecordDrawer(mixture, state)


def _mixture_of(saved: Json, present: Mixture) -> Mixture:
    """Return the mixture that a fingerprint describes, without its sources."""
    points = [(position, weights) for position, weights in saved["points"]]
    return Mixture(
        {name: (None, points[0][1][name]) for name in saved["names"]},
        schedule=(Ramp if saved["schedule"] == "Ramp" else Steps)(points, unit=saved["unit"]),
        weigh=saved["weigh"],
        length=present.length,
        stop=saved["stop"],
        repeats=saved["repeats"] or None,
    )


class _MixedReader:
    """What both ways to weigh have in common."""

    def __init__(self, children: Mapping[str, Child], drawer: Any, share: Share, mixture: Mixture, change: _Change | None) -> None:
        self._all_children = children
        self._children = [children[name] for name in mixture.names]
        self._drawer = drawer
        self._share = share
        self._mixture = mixture
        self._change = change
        self._has_ended = False
        self._end: Cursor | None = None
        self._closed = False

    async def read(self, max_records: int) -> Span | None:
        """See `aioloader.protocols.AsyncReader.read`."""
        if self._closed:
            raise ClosedError("mixture: expected an open reader, got a closed one; open the source again.")
        num_positions = 0
        records: list[Record] = []
        ids: list[RecordId] = []
        while not records and not self._has_ended:  # a stretch of other ranks' records gives none
            if self._change is not None and self._drawer.position >= self._change.until:
                self._turn_over(self._change)
            covered, found, names = await self._advance(max_records)
            num_positions += covered
            records += found
            ids += names
        return Span(records, ids, num_positions) if num_positions else None

    def cursor(self) -> Cursor:
        """See `aioloader.protocols.AsyncReader.cursor`."""
        if self._end is not None:
            return self._end
        children = {name: child.cursor() for name, child in self._all_children.items()}
        before = {} if self._change is None else {"before": self._change.note}
        return {"drawer": self._drawer.state(), "children": children, **before}

    async def aclose(self) -> None:
        """See `aioloader.protocols.AsyncReader.aclose`."""
        self._closed = True
        for child in self._all_children.values():
            await child.aclose()

    async def _advance(self, max_records: int) -> tuple[int, list[Record], list[RecordId]]:
        raise NotImplementedError

    def _turn_over(self, change: _Change) -> None:
        """Draw from another mixture from here on; the change is recorded in the drawer's state."""
        state = adopt(self._drawer.state(), change.mixture, added=change.mixture.names, reweighted=True)
        self._drawer, self._mixture, self._change = _drawer(change.mixture, state), change.mixture, None
        self._children = [self._all_children[name] for name in change.mixture.names]

    def _num_unchanged(self) -> int:
        """Return the positions that can be drawn before the mixture changes."""
        return _BLOCK if self._change is None else self._change.until - int(self._drawer.position)

    async def _exhaust(self, source: int) -> None:
        """Do about a source that has nothing left what the mixture says."""
        child, at = self._children[source], self.cursor()
        ending = self._drawer.exhausted(source)
        if ending == "stop":
            self._has_ended, self._end = True, at
            return
        if child.is_empty:
            raise SourceError(f"source {child.name!r} of the mixture: expected records to repeat, got none; leave it out or weigh it 0")
        await child.restart()

    def _is_own(self, position: int) -> bool:
        return position % self._share.count == self._share.index


class _RecordReader(_MixedReader):
    """Draws a block of positions, then reads what they need."""

    _drawer: RecordDrawer

    async def _advance(self, max_records: int) -> tuple[int, list[Record], list[RecordId]]:
        first = self._drawer.position
        num_positions = self._share.first_from(first) - first + max_records * self._share.count  # up to the next one of the share
        drawn = self._drawer.draw(min(num_positions, self._num_unchanged()))
        self._has_ended = not drawn
        wanted: list[list[bool]] = [[] for _ in self._children]
        for position, source in enumerate(drawn, start=first):
            wanted[source].append(self._is_own(position))
        given = [await child.fill(flags) if flags else 0 for child, flags in zip(self._children, wanted, strict=True)]
        num_given, lacking = _prefix(drawn, given)
        self._drawer.take_back(drawn[num_given:])
        if lacking is not None and not num_given:
            self._children[lacking].check()
            if self._children[lacking].has_ended:
                await self._exhaust(lacking)
        rows = await self._take(drawn[:num_given], wanted, first)
        return num_given, [record for record, _ in rows], [record_id for _, record_id in rows]

    async def _take(self, drawn: Sequence[int], wanted: Sequence[Sequence[bool]], first: int) -> list[Row]:
        """Take the records of the draws from the children; return those of this rank in the order of their positions."""
        counts = [drawn.count(source) for source in range(len(wanted))]
        taken = [iter(await child.take(flags[:count])) for child, flags, count in zip(self._children, wanted, counts, strict=True)]
        return [next(taken[source]) for position, source in enumerate(drawn, start=first) if self._is_own(position)]


def _prefix(drawn: Sequence[int], given: Sequence[int]) -> tuple[int, int | None]:
    """Return how many draws from the front can be given, and the source that lacks the record after them."""
    used = [0] * len(given)
    for at, source in enumerate(drawn):
        if used[source] == given[source]:
            return at, source
        used[source] += 1
    return len(drawn), None


class _TokenReader(_MixedReader):
    """Draws one by one: which source is next depends on the length of the record before."""

    _drawer: TokenDrawer

    async def _advance(self, max_records: int) -> tuple[int, list[Record], list[RecordId]]:
        records: list[Record] = []
        ids: list[RecordId] = []
        num_positions = 0
        assert self._mixture.length is not None
        most = self._num_unchanged()
        while len(records) < max_records and num_positions < most:
            source = self._drawer.next_source()
            if source is None:
                self._has_ended = True
                break
            child = self._children[source]
            if not await child.fill([True]):
                if not num_positions:  # else what is there is handed out first
                    child.check()
                    if child.has_ended:
                        await self._exhaust(source)
                break
            is_own = self._is_own(self._drawer.position)
            ((record, record_id),) = await child.take([True])
            self._drawer.note(source, self._mixture.length(record))
            num_positions += 1
            if is_own:
                records.append(record)
                ids.append(record_id)
        return num_positions, records, ids
