"""What all packers share: spans of documents, the overflow policy, rows and groups made of spans, and what is counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from aioloader.batching.counters import zero_counters
from aioloader.batching.documents import Document, as_document
from aioloader.batching.restoring import find_item
from aioloader.errors import BatchError, ResumeError
from aioloader.protocols import Group, Item, Json, PackedRow, Ref

if TYPE_CHECKING:
    from aioloader.batching.pack import Pack

__all__ = ["Span", "admit", "make_group", "restore_span", "save_span", "span_refs", "zero_pack_counters"]


Span: TypeAlias = tuple[Document, int, int]
"""A document and the tokens of it, from the first number to before the second."""


def zero_pack_counters() -> dict[str, int]:
    """Return a fresh dict with every counter at zero.

    Beside what every batcher counts: `packed_rows`, the `packed_tokens` and `packed_pieces` in them, and the `cut_documents` that
    were not left whole in one row. Row use is packed_tokens / (packed_rows * seq_len), samples per row packed_pieces / packed_rows.
    """
    return zero_counters() | dict.fromkeys(("packed_rows", "packed_tokens", "packed_pieces", "cut_documents"), 0)


def admit(document: Document, options: Pack, counters: dict[str, int]) -> int:
    """Return how many of the document's tokens to pack, and count the rest.

    Raises:
        BatchError: It is longer than a row and `overflow="error"`; nothing is counted.
    """
    length, seq_len = document.length, options.seq_len
    if length == 0:
        counters["empty_samples"] += 1
    if length <= seq_len or options.overflow == "split":
        return length
    if options.overflow == "truncate":
        counters["truncated_samples"] += 1
        counters["truncated_tokens"] += length - seq_len
        return seq_len
    if options.overflow == "drop":
        counters["dropped_samples"] += 1
        counters["dropped_tokens"] += length
        return 0
    raise BatchError(
        f"Pack: expected at most seq_len={seq_len} tokens, got {length}; shorten it in preprocess, "
        "or use overflow='split', 'truncate' or 'drop'",
        seq=document.item.seq,
        record=document.item.record,
    )


def make_group(rows: Sequence[Sequence[Span]], options: Pack, counters: dict[str, int], *, complete: bool) -> Group:
    """Return a micro-batch of these rows, with each item once, in order of its first piece; count rows, tokens and pieces."""
    items: dict[Ref, Item] = {}
    samples: list[PackedRow] = []
    for row in rows:
        pieces: list[Mapping[str, Any]] = []
        starts: list[int] = []
        length = 0
        for document, start, stop in row:
            pieces.append(document.cut(start, stop))
            starts.append(start)
            length += stop - start
            items[document.item.seq, document.item.sub] = document.item
        samples.append(PackedRow(pieces, starts, length, options.seq_len))
        counters["packed_tokens"] += length
        counters["packed_pieces"] += len(row)
    counters["packed_rows"] += len(rows)
    return Group(samples, list(items.values()), complete)


def save_span(span: Span) -> list[int]:
    """Return the span by reference: seq, sub, start, stop."""
    document, start, stop = span
    return [document.item.seq, document.item.sub, start, stop]


def span_refs(saved: Iterable[Json]) -> list[Ref]:
    """Return the refs of saved spans, each once."""
    return list(dict.fromkeys((seq, sub) for seq, sub, _, _ in saved))


def restore_span(saved: Json, items: Mapping[Ref, Item], options: Pack) -> Span:
    """Return a saved span with its document made again.

    Raises:
        ResumeError: The document is not there, or has become shorter.
    """
    seq, sub, start, stop = saved
    document = as_document(find_item(items, (seq, sub)), options.field, options.separator_tokens)
    if stop > document.length:
        difference = (f"length of sample {sub} of the record with seq {seq}", f">= {stop} tokens", f"{document.length} tokens")
        raise ResumeError([difference], do="resume with the data and the preprocess function that the state was saved with")
    return document, start, stop
