"""The contracts between layers: what a source, a batching strategy and a collator must offer.

Source.open(epoch, cursor) -> Reader.read(n) -> Span of records      (sources/)
Batching.start() -> Batcher.push(Item) -> Group of items             (batching/)
Collator(list of samples) -> dict of arrays                          (collate/)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

__all__ = [
    "AsyncReader",
    "Batcher",
    "Batching",
    "Collator",
    "ColumnCollator",
    "Cursor",
    "DealtSource",
    "Group",
    "IndexedSource",
    "Item",
    "Json",
    "PackedRow",
    "Reader",
    "Record",
    "RecordId",
    "Ref",
    "RunBatcher",
    "Sample",
    "Share",
    "Source",
    "Span",
]

Json: TypeAlias = Any
"""Anything that survives `json.loads(json.dumps(x))` unchanged."""

Record: TypeAlias = Any
"""What a source yields; `None` inside a record is a legal value."""

Sample: TypeAlias = Any
"""What preprocessing makes of a record."""

Cursor: TypeAlias = Json
"""Where a source stands; opaque to all but that source."""

RecordId: TypeAlias = tuple[str, int]
"""(shard, row): names a record for as long as the data do not change, on every topology."""

Ref: TypeAlias = tuple[int, int]
"""(seq, sub): the `sub`-th sample made of the record with sequence number `seq` of a lane."""


@dataclass(frozen=True, slots=True)
class Span:
    """Records of a source with their ids; `len(records) == len(ids) >= 1`.

    They are those of consecutive positions, `num_positions` of them: one record for each, or, from the reader of a share, those of
    the share only, of which there may be none.
    """

    records: Sequence[Record]
    ids: Sequence[RecordId]
    num_positions: int = 0

    def __post_init__(self) -> None:
        """Count one position for each record where nothing else is said."""
        if not self.num_positions:
            object.__setattr__(self, "num_positions", len(self.records))


@dataclass(frozen=True, slots=True)
class Share:
    """Every `count`-th position of the order, from `index` on: what one data-parallel rank needs of it."""

    index: int = 0
    count: int = 1

    def first_from(self, position: int) -> int:
        """Return the first of its positions at or after `position`."""
        return position + (self.index - position) % self.count


class Reader(Protocol):
    """Reads a source from one place on, blocking. Always used from one and the same thread."""

    def read(self, max_records: int) -> Span | None:
        """Return the next 1 to `max_records` records, or None at the end.

        A reader that has to wait for more may return fewer. If the upstream fails after some records, those are returned
        first and the failure is raised by the next call.
        """

    def cursor(self) -> Cursor | None:
        """Return the cursor of the next record, or None if this source can only start from the beginning."""

    def close(self) -> None:
        """Release files and iterators; safe to call twice."""


class AsyncReader(Protocol):
    """The same as `Reader` for upstreams that are asynchronous; used inside the engine's event loop."""

    async def read(self, max_records: int) -> Span | None:
        """See `Reader.read`."""

    def cursor(self) -> Cursor | None:
        """See `Reader.cursor`."""

    async def aclose(self) -> None:
        """Release files and iterators; safe to call twice."""


@runtime_checkable
class Source(Protocol):
    """A stream of records with a stable order, that can be opened at a cursor."""

    def fingerprint(self) -> Mapping[str, Json]:
        """Return what identifies the data (names, sizes, ...), small and JSON-compatible."""

    def open(self, epoch: int, cursor: Cursor | None) -> Reader | AsyncReader:
        """Return a reader for one pass over the data, from `cursor` on or from the beginning.

        Raises:
            ResumeError: The cursor does not belong to this source.
        """


@runtime_checkable
class DealtSource(Source, Protocol):
    """A source that can read one rank's share and leave out the rest: nobody fetches what another rank works on."""

    def open_share(self, epoch: int, cursor: Cursor | None, share: Share) -> Reader | AsyncReader:
        """Return a reader as `open` does, that reads the positions of `share` only. Its cursors are good for any share.

        Spans cover every position of the epoch; one whose positions are all of other shares may have no record.
        """


@runtime_checkable
class IndexedSource(Source, Protocol):
    """A source of known size, whose records can be had in any order: by shard and row."""

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Return the number of records of each shard, at least one shard."""

    def shard_name(self, shard: int) -> str:
        """Return the name that record ids carry."""

    @property
    def fetches_many(self) -> bool:
        """Return whether several rows at once cost less than one by one."""

    def start_epoch(self, epoch: int) -> None:
        """Tell the data which epoch is read next, before its first `fetch`."""

    def fetch(self, shard: int, rows: Sequence[int]) -> Sequence[Record]:
        """Return the records of these rows, in this order; blocking, always from one and the same thread.

        How many rows are asked for at once follows what they cost; a record must not depend on the others.
        """


class Item(NamedTuple):
    """One sample on its way into a micro-batch, with its provenance."""

    sample: Sample
    seq: int
    sub: int
    record: RecordId

    @property
    def ref(self) -> Ref:
        """Return the sample's name inside its lane."""
        return (self.seq, self.sub)


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one micro-batch, in order, before collation.

    Attributes:
        samples: What the collator gets.
        items: The items that the samples were made of; for packed rows an item can appear in several groups.
        complete: False for a last group that is not full; `end="drop"` drops it.
    """

    samples: Sequence[Sample]
    items: Sequence[Item]
    complete: bool = True


class Batcher(Protocol):
    """Groups the samples of one lane. Pure: the groups depend on the pushed items only.

    `push`, `ready` and `finish` form groups lazily: between two groups, `state()` is the state as of the group just yielded.
    """

    def push(self, item: Item) -> Iterator[Group]:
        """Take one item and yield the groups that it completes, in order."""

    def ready(self) -> Iterator[Group]:
        """Yield the groups that are complete without another item: after `restore`, the rest of an interrupted `push`."""

    def finish(self) -> Iterator[Group]:
        """Yield what is left at the end of an epoch (`complete=False` where not full) and start afresh.

        Between groups, `state()` is as of the last one; on a batcher restored from it, `finish` yields the rest.
        """

    def counters(self) -> dict[str, int]:
        """Return how many samples and tokens were left out since the start of the run, by reason; part of `state`."""

    def state(self) -> Json:
        """Return the buffer by reference (seq, sub numbers and offsets, never samples); constant shape."""

    def refs(self, state: Json) -> Iterable[Ref]:
        """Return the refs of all items that `restore` needs for this state."""

    def restore(self, state: Json, items: Mapping[Ref, Item]) -> None:
        """Take over `state`; `items` holds every item named by `refs(state)`, made again from its record."""


@runtime_checkable
class RunBatcher(Batcher, Protocol):
    """A batcher that takes many items at once for less than one by one costs, with the same groups."""

    def push_run(self, items: Sequence[Item]) -> Iterator[tuple[Group, int]]:
        """Take items and yield each group that they complete, with the number of items taken up to it. Refuses none.

        Lazy: after a group, `state()` is as of the item that completed it.
        """


class Batching(Protocol):
    """The frozen options of a batching strategy, checked once when they are made."""

    def start(self) -> Batcher:
        """Return a fresh batcher for one lane."""

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the options that decide the groups, small and JSON-compatible."""


class Collator(Protocol):
    """Any callable from a list of samples to a dict of arrays or tensors.

    One that can also work on columns has a method `collate_columns` (see `ColumnCollator`).

    The loader counts real tokens and padding by the first of these fields that a batch has: `attention_mask` (nonzero = real),
    `document_ids` (negative = padding), `input_ids` (all real).
    """

    def __call__(self, samples: list[Any], /) -> Mapping[str, Any]:
        """Return the micro-batch, one array per field."""


@runtime_checkable
class ColumnCollator(Collator, Protocol):
    """A collator that saves the making of samples where all samples of a micro-batch came in columns."""

    def collate_columns(self, columns: Mapping[Any, Sequence[Any]], /) -> Mapping[str, Any] | None:
        """Return what calling it with the samples would, or None if it has to see the samples.

        A column that has the attribute `pieces` (arrays to be joined along the first axis) may be returned as it is: it is
        then copied once, straight to the trainer, or is the memory of the batch itself. Do not keep columns for later.
        """


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One fixed-length row of documents, as made by packing and consumed by packing-aware collators.

    Attributes:
        pieces: The document pieces in order, each a mapping with `input_ids` and the other per-token fields.
        starts: For each piece, the token offset inside its document (0 for a document's first piece).
        length: Tokens in the row, padding not counted.
        seq_len: Tokens the row has room for.
    """

    pieces: Sequence[Mapping[str, Any]]
    starts: Sequence[int]
    length: int
    seq_len: int
