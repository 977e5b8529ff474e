"""Packing: documents one after another in rows of fixed length.

    documents   aaaa bbbbbbb cc ddd          Pack(6, rows=2)
    rows        aaaabb | bbbbbc              one group; `c ddd` waits for more

The greedy strategy lays all documents of a lane end to end and cuts that stream every `seq_len` tokens: rows are always
full, no token is lost, and the buffer is a list of spans. Only the last group of an epoch can have a shorter or missing row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

from aioloader.batching.counters import zero_counters
from aioloader.batching.documents import Document, as_document
from aioloader.batching.options import require_choice, require_positive
from aioloader.batching.restoring import find_item
from aioloader.errors import BatchError, ConfigError, ResumeError
from aioloader.protocols import Group, Item, Json, PackedRow, Ref

__all__ = ["Pack"]

_OVERFLOWS: Final = ("split", "truncate", "drop", "error")
_PLANNED_STRATEGIES: Final = ("first_fit", "best_fit")


@dataclass(frozen=True, slots=True)
class Pack:
    """Fills `rows` rows of `seq_len` tokens per micro-batch; the collator gets one `PackedRow` for each.

    Samples are mappings with a 1-D list or array of tokens in `field`; all other fields must be of the same length (`labels`,
    `loss_mask`, ...) and are cut alike. Rows name the tokens `input_ids`. Samples of length zero are skipped and counted.

    Attributes:
        seq_len: Tokens per row.
        rows: Rows per micro-batch.
        strategy: `"greedy"` fills rows in order by cutting documents at row ends.
        overflow: What happens to a document longer than a row: `"split"` lets it span rows, `"truncate"` keeps its first
            `seq_len` tokens, `"drop"` leaves it out (both are counted), `"error"` raises `BatchError`.
        field: The field that holds the tokens.
        open_bins: For strategies that keep several rows open; must be None.

    Raises:
        ConfigError: An option is out of range or unknown.
    """

    seq_len: int
    rows: int = 1
    _: KW_ONLY
    strategy: Literal["greedy"] = "greedy"
    overflow: Literal["split", "truncate", "drop", "error"] = "split"
    field: str = "input_ids"
    open_bins: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        require_positive("Pack(seq_len=...)", self.seq_len)
        require_positive("Pack(rows=...)", self.rows)
        if self.strategy in _PLANNED_STRATEGIES:
            raise _not_yet("strategy", self.strategy, expected="'greedy'")
        require_choice("Pack(strategy=...)", self.strategy, ("greedy",))
        if self.open_bins is not None:
            raise _not_yet("open_bins", self.open_bins, expected="None")
        require_choice("Pack(overflow=...)", self.overflow, _OVERFLOWS)
        if not self.field:
            raise ConfigError("Pack(field=...)", expected="a field name", got=repr(self.field), do="name the field that holds the tokens")

    def start(self) -> _GreedyPacker:
        """Return a fresh batcher for one lane."""
        return _GreedyPacker(self)

    def fingerprint(self) -> dict[str, Json]:
        """Return the options that decide the groups."""
        names = ("seq_len", "rows", "strategy", "overflow", "field")
        return {"kind": "Pack", **{name: getattr(self, name) for name in names}}


class _GreedyPacker:
    """Holds the documents not yet yielded, as spans of tokens in order; each document has at most one span."""

    __slots__ = ("_capacity", "_counters", "_num_tokens", "_options", "_spans")

    def __init__(self, options: Pack) -> None:
        self._options = options
        self._capacity = options.seq_len * options.rows
        self._spans: deque[tuple[Document, int, int]] = deque()
        self._num_tokens = 0
        self._counters = zero_counters()

    def __repr__(self) -> str:
        return f"<Pack {self._num_tokens}/{self._capacity} tokens of {len(self._spans)} documents>"

    def push(self, item: Item) -> Iterator[Group]:
        document = as_document(item, self._options.field)
        stop = self._admit(document)
        if stop:
            self._spans.append((document, 0, stop))
            self._num_tokens += stop
        return self.ready() if self._num_tokens >= self._capacity else iter(())

    def ready(self) -> Iterator[Group]:
        while self._num_tokens >= self._capacity:
            yield self._cut_group(complete=True)

    def finish(self) -> Iterator[Group]:
        yield from self.ready()
        if self._num_tokens:
            yield self._cut_group(complete=False)

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def state(self) -> Json:
        spans = [[document.item.seq, document.item.sub, start, stop] for document, start, stop in self._spans]
        return {"spans": spans, "counters": self.counters()}

    def refs(self, state: Json) -> Iterable[Ref]:
        return [(seq, sub) for seq, sub, _, _ in state["spans"]]

    def restore(self, state: Json, items: Mapping[Ref, Item]) -> None:
        spans: deque[tuple[Document, int, int]] = deque()
        for seq, sub, start, stop in state["spans"]:
            document = as_document(find_item(items, (seq, sub)), self._options.field)
            if stop > document.length:
                difference = (f"length of sample {sub} of the record with seq {seq}", f">= {stop} tokens", f"{document.length} tokens")
                raise ResumeError([difference], do="resume with the data and the preprocess function that the state was saved with")
            spans.append((document, start, stop))
        self._spans = spans
        self._num_tokens = sum(stop - start for _, start, stop in spans)
        self._counters = zero_counters() | state["counters"]

    def _admit(self, document: Document) -> int:
        """Return how many of the document's tokens to pack and count the rest.

        Raises:
            BatchError: It is longer than a row and `overflow="error"`; the buffer is as before.
        """
        length, seq_len = document.length, self._options.seq_len
        if length == 0:
            self._counters["empty_samples"] += 1
        if length <= seq_len or self._options.overflow == "split":
            return length
        if self._options.overflow == "truncate":
            self._counters["truncated_samples"] += 1
            self._counters["truncated_tokens"] += length - seq_len
            return seq_len
        if self._options.overflow == "drop":
            self._counters["dropped_samples"] += 1
            self._counters["dropped_tokens"] += length
            return 0
        raise BatchError(
            f"Pack: expected at most seq_len={seq_len} tokens, got {length}; shorten it in preprocess, "
            "or use overflow='split', 'truncate' or 'drop'",
            seq=document.item.seq,
            record=document.item.record,
        )

    def _cut_group(self, *, complete: bool) -> Group:
        rows: list[PackedRow] = []
        items: list[Item] = []
        while self._spans and len(rows) < self._options.rows:
            rows.append(self._cut_row(items))
        return Group(rows, items, complete)

    def _cut_row(self, items: list[Item]) -> PackedRow:
        """Take up to `seq_len` tokens from the front of the buffer; append the items that are new to the group to `items`."""
        pieces: list[Mapping[str, Any]] = []
        starts: list[int] = []
        room = self._options.seq_len
        while room and self._spans:
            document, start, stop = self._spans.popleft()
            cut = min(stop, start + room)
            if cut < stop:
                self._spans.appendleft((document, cut, stop))
            pieces.append(document.cut(start, cut))
            starts.append(start)
            room -= cut - start
            if not items or items[-1] is not document.item:
                items.append(document.item)
        length = self._options.seq_len - room
        self._num_tokens -= length
        return PackedRow(pieces, starts, length, self._options.seq_len)


def _not_yet(option: str, got: object, *, expected: str) -> ConfigError:
    do = "this is not yet in this version; use strategy='greedy' without open_bins"
    return ConfigError(f"Pack({option}=...)", expected=expected, got=repr(got), do=do)
