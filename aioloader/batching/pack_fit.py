"""Packing by fit: rows of whole documents, chosen as a row closes from the documents held."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from aioloader.batching.bins import FitStrategy, OpenRows
from aioloader.batching.documents import as_document
from aioloader.batching.pack_spans import Span, admit, make_group, restore_span, save_span, span_refs, zero_pack_counters
from aioloader.protocols import Group, Item, Json, Ref

if TYPE_CHECKING:
    from aioloader.batching.pack import Pack

__all__ = ["FitPacker"]


class FitPacker:
    """Holds the documents without a row, known to `OpenRows` by ticket, and the closed rows of the group that comes next.

    Rows close as documents come and groups are made of them lazily, so that between two groups of a long document the state
    is that as of the first.
    """

    __slots__ = ("_closed", "_counters", "_held", "_open", "_options", "_separator")

    def __init__(self, options: Pack, strategy: FitStrategy) -> None:
        self._options = options
        self._separator = options.separator_tokens
        self._open = OpenRows(options.seq_len, strategy=strategy, open_bins=options.open_bins, max_age=options.max_age)
        self._held: dict[int, Span] = {}
        self._closed: deque[list[Span]] = deque()
        self._counters = zero_pack_counters()

    def __repr__(self) -> str:
        rows = f"{len(self._closed)}/{self._options.rows} rows"
        return f"<Pack {rows}, {self._open.num_tokens} tokens of {len(self._held)} documents held>"

    def push(self, item: Item) -> Iterator[Group]:
        """See `Batcher.push`."""
        document = as_document(item, self._options.field, self._separator)
        stop = admit(document, self._options, self._counters)
        start = 0
        self._counters["cut_documents"] += stop > self._options.seq_len
        while stop - start >= self._options.seq_len:
            self._closed.append([(document, start, start + self._options.seq_len)])
            start += self._options.seq_len
        if start < stop:
            self._held[self._open.add(stop - start)] = (document, start, stop)
        elif stop:
            self._open.pass_by()
        while self._open.is_ripe:
            self._close_row()
        return self.ready()

    def ready(self) -> Iterator[Group]:
        """See `Batcher.ready`."""
        while len(self._closed) >= self._options.rows:
            yield self._take_group()

    def finish(self) -> Iterator[Group]:
        """See `Batcher.finish`; a group of `rows` rows is complete, as no row of a fit has to be full."""
        while self._held:
            self._close_row()
        yield from self.ready()
        if self._closed:
            yield self._take_group()

    def counters(self) -> dict[str, int]:
        """See `Batcher.counters` and `zero_pack_counters`."""
        return dict(self._counters)

    def state(self) -> Json:
        """Return the spans of each closed row, the spans held, oldest first, with their ages in documents, and the counters."""
        return {
            "rows": [[save_span(span) for span in row] for row in self._closed],
            "spans": [save_span(span) for span in self._held.values()],
            "ages": self._open.ages,
            "counters": self.counters(),
        }

    def refs(self, state: Json) -> Iterable[Ref]:
        """See `Batcher.refs`."""
        return span_refs(chain(*state["rows"], state["spans"]))

    def restore(self, state: Json, items: Mapping[Ref, Item]) -> None:
        """See `Batcher.restore`."""
        closed = [[restore_span(saved, items, self._options) for saved in row] for row in state["rows"]]
        held = [restore_span(saved, items, self._options) for saved in state["spans"]]
        tickets = self._open.restore([stop - start for _, start, stop in held], state["ages"])
        self._closed, self._held = deque(closed), dict(zip(tickets, held, strict=True))
        self._counters = zero_pack_counters() | state["counters"]

    def _close_row(self) -> None:
        self._closed.append([self._held.pop(ticket) for ticket in self._open.close()])

    def _take_group(self) -> Group:
        rows = [self._closed.popleft() for _ in range(min(self._options.rows, len(self._closed)))]
        return make_group(rows, self._options, self._counters, complete=len(rows) == self._options.rows)
