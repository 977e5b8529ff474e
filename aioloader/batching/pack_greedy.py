"""Greedy packing: all documents end to end, cut every `seq_len` tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from aioloader.batching.documents import as_document
from aioloader.batching.pack_spans import Span, admit, make_group, restore_span, save_span, span_refs, zero_pack_counters
from aioloader.protocols import Group, Item, Json, Ref

if TYPE_CHECKING:
    from aioloader.batching.pack import Pack

__all__ = ["GreedyPacker"]


class GreedyPacker:
    """Holds the documents not yet yielded, as spans of tokens in order; each document has at most one span."""

    __slots__ = ("_capacity", "_counters", "_num_tokens", "_options", "_separator", "_spans")

    def __init__(self, options: Pack) -> None:
        self._options = options
        self._separator = options.separator_tokens
        self._capacity = options.seq_len * options.rows
        self._spans: deque[Span] = deque()
        self._num_tokens = 0
        self._counters = zero_pack_counters()

    def __repr__(self) -> str:
        return f"<Pack {self._num_tokens}/{self._capacity} tokens of {len(self._spans)} documents>"

    def push(self, item: Item) -> Iterator[Group]:
        """See `Batcher.push`."""
        document = as_document(item, self._options.field, self._separator)
        stop = admit(document, self._options, self._counters)
        if stop:
            self._spans.append((document, 0, stop))
            self._num_tokens += stop
        return self.ready() if self._num_tokens >= self._capacity else iter(())

    def ready(self) -> Iterator[Group]:
        """See `Batcher.ready`."""
        while self._num_tokens >= self._capacity:
            yield self._cut_group(complete=True)

    def finish(self) -> Iterator[Group]:
        """See `Batcher.finish`."""
        yield from self.ready()
        if self._num_tokens:
            yield self._cut_group(complete=False)

    def counters(self) -> dict[str, int]:
        """See `Batcher.counters` and `zero_pack_counters`."""
        return dict(self._counters)

    def state(self) -> Json:
        """Return the spans in order, and the counters."""
        return {"spans": [save_span(span) for span in self._spans], "counters": self.counters()}

    def refs(self, state: Json) -> Iterable[Ref]:
        """See `Batcher.refs`."""
        return span_refs(state["spans"])

    def restore(self, state: Json, items: Mapping[Ref, Item]) -> None:
        """See `Batcher.restore`."""
        self._spans = deque([restore_span(saved, items, self._options) for saved in state["spans"]])
        self._num_tokens = sum(stop - start for _, start, stop in self._spans)
        self._counters = zero_pack_counters() | state["counters"]

    def _cut_group(self, *, complete: bool) -> Group:
        rows: list[list[Span]] = []
        while self._spans and len(rows) < self._options.rows:
            rows.append(self._cut_row())
        return make_group(rows, self._options, self._counters, complete=complete)

    def _cut_row(self) -> list[Span]:
        """Take up to `seq_len` tokens from the front of the buffer."""
        row: list[Span] = []
        room = self._options.seq_len
        while room and self._spans:
            document, start, stop = self._spans.popleft()
            cut = min(stop, start + room)
            if cut < stop:
                self._spans.appendleft((document, cut, stop))
                self._counters["cut_documents"] += start == 0
            row.append((document, start, cut))
            room -= cut - start
        self._num_tokens -= self._options.seq_len - room
        return row
