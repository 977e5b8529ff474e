"""Sources, preprocess functions and collators of the tests of order and resume, and what a micro-batch says, comparable.

Light on purpose: the engine's processes import it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np

from aioloader import AsyncIterableSource, IterableSource, Mixture, Ramp, Steps
from aioloader.order.ordered import OrderedIndex
from aioloader.pools.rng import record_rng
from aioloader.protocols import Json, PackedRow
from tests.contract.cases import documents
from tests.contract.reference import Data, MicroBatch, Mixed

SHARD_SIZES = (4, 0, 7, 1, 5, 9)


class Shards:
    """An indexed source of several shards, one of them empty."""

    fetches_many = True

    def __init__(self, shards: dict[str, list[Any]]) -> None:
        self._shards = list(shards.items())
        self.shard_sizes = [len(records) for records in shards.values()]

    def shard_name(self, shard: int) -> str:
        return self._shards[shard][0]

    def start_epoch(self, epoch: int) -> None:
        pass

    def fetch(self, shard: int, rows: Sequence[int]) -> Sequence[Any]:
        return [self._shards[shard][1][row] for row in rows]

    def fingerprint(self) -> dict[str, Json]:
        return {"kind": "shards", "sizes": self.shard_sizes}

    def open(self, epoch: int, cursor: Any) -> Any:
        return OrderedIndex(self, None, 0).open(epoch, cursor)


class Lines:
    """A stream that can only be read from its beginning."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        return iter(self.records)


class Bookmarked:
    """A stream that knows its own place, and refuses to be asked about it where it is not."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        while self._next < len(self.records):
            self._next += 1
            yield self.records[self._next - 1]
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class AsyncLines(Lines):
    """The same as `Lines`, asynchronously."""

    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[Any]:
        for record in self.records:
            yield record


def in_shards(records: list[Any]) -> dict[str, list[Any]]:
    """Return records in shards of the sizes of `SHARD_SIZES`, over and over."""
    shards: dict[str, list[Any]] = {}
    first = 0
    while first < len(records) or not shards:
        size = SHARD_SIZES[len(shards) % len(SHARD_SIZES)]
        shards[f"shard-{len(shards)}"] = records[first : first + size]
        first += size
    return shards


def plain_source(kind: str, records: list[Any]) -> tuple[Any, Data]:
    """Return a source of these records, and the same as data."""
    if kind == "shards":
        shards = in_shards(records)
        return Shards(shards), Data(shards)
    if kind == "list":
        return list(records), Data({"sequence": records})
    if kind == "async stream":
        return AsyncIterableSource(AsyncLines(records)), Data({"async_iterable": records}, is_stream=True)
    make = Bookmarked if kind == "bookmarked stream" else Lines
    return IterableSource(make(records)), Data({"iterable": records}, is_stream=True)


PLAIN = ("list", "shards", "stream", "bookmarked stream", "async stream")

MIXTURES: dict[str, dict[str, Any]] = {
    "mixture": {},
    "mixture with steps": {
        "stop": "all_exhausted",
        "schedule": Steps([(0, {"a": 0.4, "b": 0.2, "c": 0.4}), (9, {"a": 0.6, "b": 0.4, "c": 0.0}), (13, {"a": 1, "b": 0, "c": 1})]),
    },
    "mixture with a ramp": {
        "schedule": Ramp([(0, {"a": 0.3, "b": 0.5, "c": 0.2}), (10, {"a": 0.8, "b": 0.1, "c": 0.1})]),
        "repeats": {"b": 1, "c": 2},
    },
    "mixture without end": {"stop": "repeat", "repeats": {"b": 2}},
}


def num_tokens(record: dict[str, Any]) -> int:
    return len(record["tokens"])


def mixed_source(kind: str, records: list[Any]) -> tuple[Any, Mixed]:
    """Return a mixture of an indexed source, a stream and one with a state of its own, and the same as data."""
    cut = len(records) // 2, len(records) * 3 // 4
    parts = {"a": records[: cut[0]], "b": records[cut[0] : cut[1]], "c": records[cut[1] :]}
    made = {name: plain_source(PLAIN[1 + number], part) for number, (name, part) in enumerate(parts.items())}
    sources = {name: (source, weight) for (name, (source, _)), weight in zip(made.items(), (0.5, 0.3, 0.2), strict=True)}
    options = {"weigh": "tokens", "length": num_tokens} if kind == "mixture by tokens" else MIXTURES[kind]
    mixture = Mixture(sources, **options)
    return mixture, Mixed(mixture, {name: data for name, (_, data) in made.items()})


def make_source(kind: str, num_records: int) -> tuple[Any, Data | Mixed]:
    """Return a fresh source by name, as a loader takes it, and what is in it."""
    records = documents(num_records)
    return mixed_source(kind, records) if kind.startswith("mixture") else plain_source(kind, records)


class Prepare:
    """Filters some records and all of a stretch, makes two or three samples of others; maybe of random tokens, maybe all of one length.

    A sample of a record has 1 to 13 tokens, each of which tells the record.
    """

    def __init__(self, stretch: tuple[int, int] = (0, 0), *, is_random: bool = False, length: int | None = None) -> None:
        self.stretch = range(*stretch)
        self.is_random = is_random
        self.length = length

    def __call__(self, record: dict[str, Any]) -> Any:
        number = record["number"]
        if number in self.stretch or number % 7 == 3:
            return None
        tokens = np.array(record["tokens"] if self.length is None else [number] * self.length)
        made = [self._sample(tokens * 10 + part) for part in range(2 + number % 2 if number % 5 == 1 else 1)]
        return made if len(made) > 1 else made[0]

    def _sample(self, tokens: Any) -> dict[str, Any]:
        if self.is_random:
            tokens = tokens + record_rng().integers(0, 10**6, tokens.shape)
        return {"input_ids": tokens, "labels": tokens + 1}

    def fingerprint(self) -> dict[str, Json]:
        return {"stretch": [self.stretch.start, self.stretch.stop], "random": self.is_random, "length": self.length}


def rows_as_arrays(samples: list[Any]) -> dict[str, Any]:
    """Collate packed rows or plain samples to all their tokens, and for each piece its row, where it begins in its document, its length."""
    pieces = []
    for number, sample in enumerate(samples):
        if isinstance(sample, PackedRow):
            pieces += [(number, start, piece["input_ids"]) for start, piece in zip(sample.starts, sample.pieces, strict=True)]
        else:
            pieces.append((number, 0, sample["input_ids"]))
    return as_arrays(pieces)


def as_arrays(pieces: list[tuple[int, int, Any]]) -> dict[str, Any]:
    table = [(row, start, len(tokens)) for row, start, tokens in pieces]
    return {"tokens": np.concatenate([np.asarray(tokens) for _, _, tokens in pieces]), "pieces": np.array(table)}


Facts = tuple[Any, ...]


def facts_of(batch: Any) -> Facts:
    """Return (step, lane, epoch, record ids with subs, content hash) of a delivered micro-batch."""
    samples = tuple((sample.record, sample.sub) for sample in batch.samples)
    assert all(sample.epoch == batch.epoch for sample in batch.samples)
    return (batch.step, batch.lane, batch.epoch, samples, digest({name: value.numpy() for name, value in batch.items()}))


def facts_expected(batch: MicroBatch, step: int, lane: int) -> Facts:
    """Return the same of one in the reference."""
    pieces = [(number, start, tokens) for number, row in enumerate(batch.rows) for start, tokens in row]
    return (step, lane, batch.epoch, tuple(batch.docs), digest(as_arrays(pieces)))


def digest(fields: dict[str, Any]) -> str:
    """Return a hash of arrays, their names, dtypes and shapes."""
    made = hashlib.blake2b(digest_size=8)
    for name, value in sorted(fields.items()):
        made.update(f"{name} {value.dtype} {value.shape}".encode())
        made.update(np.ascontiguousarray(value).tobytes())
    return made.hexdigest()


def through_json(state: Any) -> Any:
    """Return a state as a file gives it back; nothing may change on the way."""
    text = json.dumps(state, allow_nan=False)
    back = json.loads(text)
    assert back == state
    assert json.dumps(back) == text
    return back
