"""What a run delivers, in plain Python: lists and loops from what the docstrings promise, nothing of the engine.

    records of an epoch, in order -> dealt to lanes -> preprocess -> batched for each lane -> one micro-batch of each lane a step

Only the keyed permutation and the draws of a mixture by records are taken from the package: golden tests pin them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np

from aioloader import Bucket, FixedBatch, Mixture, Pack, Shuffle, TokenBudget
from aioloader.order.drawer import RecordDrawer
from aioloader.order.permutation import KeyedPermutation, permutation_key

Row = tuple[tuple[str, int], Any]
"""A record with its id."""


@dataclass(frozen=True)
class Data:
    """Shards of records by name; a stream has one, and its size is not known beforehand."""

    shards: dict[str, list[Any]]
    is_stream: bool = False


@dataclass(frozen=True)
class Mixed:
    """A mixture by records, and what is in each source."""

    mixture: Mixture
    data: dict[str, Data]


@dataclass(frozen=True)
class Doc:
    """A sample and where it comes from: the `sub`-th sample of a record."""

    record: tuple[str, int]
    sub: int
    tokens: list[int]


@dataclass(frozen=True)
class MicroBatch:
    """What a micro-batch says: its epoch, the samples in it, and its rows as (tokens, where in its document each piece begins)."""

    epoch: int
    docs: list[tuple[tuple[str, int], int]]
    rows: list[list[tuple[int, list[int]]]]


# The order of an epoch


def permuted(rows: Sequence[Any], seed: int, epoch: int, purpose: str) -> list[Any]:
    permutation = KeyedPermutation(len(rows), permutation_key(seed, epoch, purpose))
    return [rows[permutation.at(place)] for place in range(len(rows))]


def in_order(data: Data, shuffle: Shuffle | None, seed: int, epoch: int, purpose: str = "records") -> list[Row]:
    """Return the records of an epoch in the order in which they are handed out."""
    shards = [[((name, row), record) for row, record in enumerate(records)] for name, records in data.shards.items()]
    if shuffle is None:
        return list(chain.from_iterable(shards))
    seed = seed if shuffle.seed is None else shuffle.seed
    if data.is_stream:
        (rows,) = shards
        windows = [rows[first : first + shuffle.window] for first in range(0, len(rows), shuffle.window)]
    else:
        shards = permuted(shards, seed, epoch, f"{purpose}, shards")
        num_windows = -(-len(shards) // (shuffle.shards_in_window or len(shards)))
        borders = [number * len(shards) // num_windows for number in range(num_windows + 1)]
        windows = [list(chain.from_iterable(shards[start:stop])) for start, stop in pairwise(borders)]
    return [row for number, window in enumerate(windows) for row in permuted(window, seed, epoch, f"{purpose}, window {number}")]


def mixed(source: Mixed, shuffle: Shuffle | None, seed: int, epoch: int) -> Iterator[Row]:
    """Yield the records of an epoch of a mixture; one that repeats for ever has no end."""
    names = list(source.data)
    drawer = RecordDrawer(source.mixture)

    def open_pass(name: str, number: int) -> Iterator[Row]:
        rows = in_order(source.data[name], shuffle, seed, epoch + number, name)
        return (((f"{name}/{shard}", row), record) for (shard, row), record in rows)

    passes = [open_pass(name, 0) for name in names]
    while drawn := drawer.draw(1):
        (chosen,) = drawn
        row = next(passes[chosen], None)
        if row is not None:
            yield row
            continue
        drawer.take_back(drawn)
        if drawer.exhausted(chosen) == "stop":
            return
        passes[chosen] = open_pass(names[chosen], drawer.passes[chosen])


# Batching


def fixed(options: FixedBatch, docs: Sequence[Doc]) -> Iterator[list[Doc]]:
    for first in range(0, len(docs) - options.batch_size + 1, options.batch_size):
        yield list(docs[first : first + options.batch_size])


def token_budget(options: TokenBudget, docs: Sequence[Doc]) -> Iterator[list[Doc]]:
    multiple = options.multiple_of

    def fits(lengths: list[int]) -> bool:
        padded = len(lengths) * (-(-max(lengths) // multiple) * multiple)
        cost = padded if options.padded else sum(lengths)
        return cost <= options.max_tokens and len(lengths) <= (options.max_samples or len(lengths))

    held: list[Doc] = []
    for doc in docs:
        length = len(doc.tokens)
        if length == 0 or (options.overflow == "drop" and not fits([length])):
            continue
        if held and not fits([len(one.tokens) for one in [*held, doc]]):
            yield held
            held = []
        held.append(doc)
        if not fits([*(len(one.tokens) for one in held), 1]):
            yield held
            held = []


def bucketed(options: Bucket, docs: Sequence[Doc]) -> Iterator[list[Doc]]:
    boundaries = list(options.boundaries)
    if options.max_tokens is not None:
        sizes = [options.max_tokens // boundary for boundary in boundaries]
    else:
        size = options.batch_size
        assert size is not None
        sizes = [size] * len(boundaries) if isinstance(size, int) else list(size)
    lookahead = options.lookahead or 8 * max(sizes)
    max_age = options.max_age or 32 * max(sizes)
    waiting: list[tuple[int, int, Doc]] = []
    now = 0

    def take(bucket: int) -> list[Doc]:
        taken = [doc for _, number, doc in waiting if number == bucket]
        waiting[:] = [entry for entry in waiting if entry[1] != bucket]
        return taken

    for doc in docs:
        length = len(doc.tokens)
        bucket = sum(length > boundary for boundary in boundaries)
        if length == 0 or (bucket == len(boundaries) and options.overflow == "drop"):
            continue
        now += 1
        waiting.append((now, bucket, doc))
        if sum(number == bucket for _, number, _ in waiting) == [*sizes, 1][bucket]:
            yield take(bucket)
        while waiting and (len(waiting) > lookahead or now - waiting[0][0] >= max_age):
            yield take(waiting[0][1])


def packed(options: Pack, docs: Sequence[Doc]) -> Iterator[tuple[list[Doc], list[list[tuple[int, list[int]]]]]]:
    """Yield the documents and the rows of each micro-batch of greedy packing: all documents end to end, cut into rows."""
    flat: list[tuple[Doc, int, int]] = []
    for doc in docs:
        tokens = [*doc.tokens, *options.separator_tokens] if doc.tokens else []
        if len(tokens) > options.seq_len and options.overflow != "split":
            tokens = tokens[: options.seq_len] if options.overflow == "truncate" else []
        flat += [(doc, place, token) for place, token in enumerate(tokens)]
    size = options.seq_len * options.rows
    for first in range(0, len(flat) - size + 1, size):
        part = flat[first : first + size]
        found: list[Doc] = []
        rows: list[list[tuple[int, list[int]]]] = []
        for at, (doc, place, token) in enumerate(part):
            if at % options.seq_len == 0:
                rows.append([])
            if at % options.seq_len == 0 or doc is not part[at - 1][0]:
                rows[-1].append((place, []))
            rows[-1][-1][1].append(token)
            if not any(doc is one for one in found):
                found.append(doc)
        yield found, rows


def batched(options: Any, docs: Sequence[Doc]) -> Iterator[tuple[list[Doc], list[list[tuple[int, list[int]]]]]]:
    """Yield the full micro-batches of one lane in one epoch."""
    if isinstance(options, Pack):
        yield from packed(options, docs)
        return
    rule: Any = {FixedBatch: fixed, TokenBudget: token_budget, Bucket: bucketed}[type(options)]
    for group in rule(options, docs):
        yield group, [[(0, doc.tokens)] for doc in group]


# The run


@dataclass(frozen=True)
class Reference:
    """A run by its options. `preprocess` returns None, a sample or a list of samples with `input_ids`.

    Of an epoch that has no end, `limit` records are looked at, and the micro-batches that they fill.
    """

    source: Data | Mixed
    shuffle: Shuffle | None
    seed: int
    num_lanes: int
    preprocess: Callable[[Any], Any]
    batching: Any
    limit: int | None = None

    def records(self, epoch: int) -> list[Row]:
        """Return the records of an epoch that are dealt out: with several lanes, as many to each."""
        if isinstance(self.source, Mixed):
            rows = list(islice(mixed(self.source, self.shuffle, self.seed, epoch), self.limit))
        else:
            rows = in_order(self.source, self.shuffle, self.seed, epoch)[: self.limit]
        return rows[: len(rows) // self.num_lanes * self.num_lanes]

    def lanes(self, first_epoch: int, end_epoch: int) -> list[list[MicroBatch]]:
        """Return the micro-batches of each lane in a pass over these epochs. A rank ends with the shortest of its lanes."""
        found: list[list[MicroBatch]] = [[] for _ in range(self.num_lanes)]
        for epoch in range(first_epoch, end_epoch):
            rows = self.records(epoch)
            for number, lane in enumerate(found):
                docs = [doc for record_id, record in rows[number :: self.num_lanes] for doc in self.samples(record_id, record)]
                for group, made in batched(self.batching, docs):
                    lane.append(MicroBatch(epoch, [(doc.record, doc.sub) for doc in group], made))
        return found

    def samples(self, record_id: tuple[str, int], record: Any) -> list[Doc]:
        made = self.preprocess(record)
        samples = [] if made is None else made if isinstance(made, list) else [made]
        return [Doc(record_id, sub, np.asarray(one["input_ids"]).tolist()) for sub, one in enumerate(samples)]
