"""One lane: takes the samples of its records in seq order, yields its micro-batches with the state as of each.

State of a lane, as of a micro-batch:

    epoch, seq, sub    the next sample to take: the `sub`-th of record `seq` of `epoch`
    step               micro-batches made so far, over all epochs
    batcher            samples taken and not yet in a micro-batch, by reference
    quarantined        ids of the records that were left out because they failed
    counts             what became of the records and samples so far
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from aioloader.engine.overflow import Stored
from aioloader.protocols import Batching, Group, Item, Json, RecordId, Ref, RunBatcher, Sample
from aioloader.sequences import ItemRun, dense

__all__ = ["Lane", "LaneBatch", "fresh_lane_state", "oldest_seq"]

_COUNTS = (
    "records",
    "repeated_records",
    "filtered_records",
    "quarantined_records",
    "samples",
    "delivered_samples",
    "delivered_tokens",
    "dropped_samples",
    "dropped_records",
)

_NEVER = 1 << 63


class LaneBatch(NamedTuple):
    """A micro-batch of a lane before collation, with the lane's state right after it.

    `num_records` counts the records whose last sample went into it: their place in the in-flight budget comes free with it.
    `num_samples` counts the samples whose last part went into it: one that is packed in pieces is delivered with the last.
    """

    lane: int
    step: int
    epoch: int
    group: Group
    state: Json
    num_records: int
    num_samples: int
    oldest_seq: int
    """The first record that the lane needs again in this state."""
    stored: Stored | None = None
    """Where its samples are if they are not here."""

    @property
    def is_filler(self) -> bool:
        """Return whether it only keeps the lanes in step: nothing is in it."""
        return not self.group.samples and self.stored is None


def fresh_lane_state(batching: Batching, epoch: int, *, makes_fillers: bool = False) -> dict[str, Json]:
    """Return the state of a lane before its first record; of one that `makes_fillers`, it has room for what they look like."""
    return {
        **({"filler": None} if makes_fillers else {}),
        "epoch": epoch,
        "seq": 0,
        "sub": 0,
        "step": 0,
        "batcher": batching.start().state(),
        "quarantined": [],
        "counts": {**dict.fromkeys(_COUNTS, 0), **_named(batching.start().counters())},
    }


def oldest_seq(batching: Batching, state: Json) -> int:
    """Return the first record that a lane in this state needs again."""
    return min([int(state["seq"]), *(seq for seq, _ in batching.start().refs(state["batcher"]))])


def _named(counters: Mapping[str, int]) -> dict[str, int]:
    """Return what a batcher counted under names of its own."""
    return dict(zip(map(_own_name, counters), counters.values(), strict=True))


@functools.cache
def _own_name(name: str) -> str:
    return f"batching_{name}"


class Lane:
    """Batches one lane. Pure: no clock, no I/O."""

    def __init__(self, number: int, batching: Batching, state: Json, *, keep_partial: bool, first_repeat: int | None = None) -> None:
        self.number = number
        self._first_repeat = _NEVER if first_repeat is None else first_repeat
        """The first seq of an epoch whose record was there already: the epoch was filled up with records from its beginning."""
        self._batcher = batching.start()
        self._run_batcher = self._batcher if isinstance(self._batcher, RunBatcher) else None
        self._keep_partial = keep_partial
        self._epoch = int(state["epoch"])
        self._seq = int(state["seq"])
        self._sub = int(state["sub"])
        self._step = int(state["step"])
        self._counts: dict[str, int] = dict(state["counts"])
        self.quarantined: list[RecordId] = [(shard, row) for shard, row in state["quarantined"]]
        self._quarantined_json: list[Json] = [list(record) for record in self.quarantined]
        self._counters: dict[str, int] | None = None
        """The batcher's own, as they are among `_counts`."""
        self._num_open = 0
        self._num_pushed = 0
        self._num_ragged = 0
        self._saved = state["batcher"]
        self._refs: frozenset[Ref] | None = frozenset(self._batcher.refs(self._saved))
        self._items: dict[Ref, Item] = {}

    @property
    def num_open(self) -> int:
        """Return the records taken whose samples are not all in a micro-batch yet."""
        return self._num_open

    @property
    def num_records(self) -> int:
        """Return the records taken so far, over the whole run."""
        return self._counts["records"]

    @property
    def takes_runs(self) -> bool:
        """Return whether `take_run` may be called: nothing of a saved buffer is missing."""
        return self._refs is None

    @property
    def takes_any_run(self) -> bool:
        """Return whether `take_run` may be called and cannot fail, so that other lanes need not have taken what came before."""
        return self._refs is None and self._run_batcher is not None

    def take_run(self, seqs: Sequence[int], records: Sequence[RecordId], samples: Sequence[Sample]) -> Iterator[LaneBatch]:
        """Take consecutive records that gave one sample each: the same as `take` for each of them."""
        seqs = dense(seqs)
        items = ItemRun(samples, seqs, records)
        self._num_pushed = 0
        num_counted = 0
        try:
            for group, taken in self._push_each(items) if self._run_batcher is None else self._run_batcher.push_run(items):
                self._count_run(taken - num_counted)
                self._seq, num_counted = seqs[taken - 1] + 1, taken
                yield self._batch(group)
        except Exception:  # a batching refused an item: those before it are taken
            self._count_run(self._num_pushed - num_counted)
            self._seq = seqs[self._num_pushed]
            raise
        self._count_run(len(items) - num_counted)
        self._seq = seqs[-1] + 1

    def _push_each(self, items: ItemRun) -> Iterator[tuple[Group, int]]:
        push = self._batcher.push
        for number, item in enumerate(items, start=1):
            for group in push(item):
                yield group, number
            self._num_pushed = number

    def take(self, seq: int, record: RecordId, samples: Sequence[Sample], *, is_left_out: bool = False) -> Iterator[LaneBatch]:
        """Take all samples of the next record and yield the micro-batches that they complete.

        A record that `is_left_out` is quarantined and has no samples.
        """
        if self._refs is not None:
            if seq < self._seq:
                self._keep(seq, record, samples)
                self._num_open += 1
                return
            self._keep(seq, record, samples[: self._sub])
            self._num_open += self._sub > 0
            yield from self._restore()
        skip = self._sub if seq == self._seq else 0
        if not skip:
            self._counts["records"] += 1
            self._counts["repeated_records"] += seq >= self._first_repeat
            self._counts["samples"] += len(samples)
            self._counts["quarantined_records" if is_left_out else "filtered_records"] += not samples
            self._num_open += bool(samples)
        if is_left_out and record not in self.quarantined:
            self.quarantined.append(record)
            self._quarantined_json = [*self._quarantined_json, list(record)]
        for sub in range(skip, len(samples)):
            groups = self._batcher.push(Item(samples[sub], seq, sub, record))  # raises with the buffer and the place unchanged
            self._seq, self._sub = (seq, sub + 1) if sub + 1 < len(samples) else (seq + 1, 0)
            for group in groups:
                yield self._batch(group)
        self._seq, self._sub = seq + 1, 0

    def end_epoch(self, epoch: int) -> Iterator[LaneBatch]:
        """Yield what is left, as `end` says, and begin the next epoch with an empty buffer."""
        if epoch != self._epoch:  # resumed beside a lane that was an epoch behind
            return
        if self._refs is not None:
            yield from self._restore()
        for group in self._batcher.finish():  # as of each, the lane still stands in this epoch: so it does if resumed there
            if group.complete or self._keep_partial:
                yield self._batch(group)
            else:
                self._counts["dropped_samples"] += _num_finished(group, set(self._batcher.refs(self._batcher.state())))
        self._begin(epoch + 1)
        self._num_open = 0

    def _begin(self, epoch: int) -> None:
        self._epoch, self._seq, self._sub = epoch, 0, 0
        self._counts["dropped_records"] += self._num_ragged
        self._num_ragged = 0

    def end_early(self) -> Iterator[LaneBatch]:
        """Yield what is left before a failure, also if it is not full: everything before the failing record is delivered."""
        if self._refs is not None:
            if not self._refs <= self._items.keys():  # a resume that did not get as far: what was saved stands
                return
            yield from self._restore()
        for group in self._batcher.finish():
            yield self._batch(group)

    @property
    def num_steps(self) -> int:
        """Return the micro-batches made so far, over the whole run."""
        return self._step

    def filler(self) -> LaneBatch:
        """Return a micro-batch with nothing in it, for a lane whose pass is over while others have more."""
        return self._batch(Group((), ()), epoch=max(0, self._epoch - 1))

    def drop_record(self) -> None:
        """Count, with the end of the epoch, a record of a ragged end that this lane does not take."""
        self._num_ragged += 1

    def state(self) -> dict[str, Json]:
        """Return the lane's state as of the last micro-batch yielded, or as of now between records."""
        return self._state(self._batcher.state() if self._refs is None else self._saved)

    def _state(self, batcher: Json) -> dict[str, Json]:
        if self._refs is None and (counters := self._batcher.counters()) != self._counters:
            self._counters = counters
            self._counts.update(_named(counters))
        return {
            "epoch": self._epoch,
            "seq": self._seq,
            "sub": self._sub,
            "step": self._step,
            "batcher": batcher,
            "quarantined": self._quarantined_json,  # shared by the states of all micro-batches that wait
            "counts": self._counts.copy(),
        }

    def _batch(self, group: Group, epoch: int | None = None) -> LaneBatch:
        step, self._step = self._step, self._step + 1
        batcher = self._batcher.state()
        left = set(self._batcher.refs(batcher))
        num_samples = _num_finished(group, left)
        self._counts["delivered_samples"] += num_samples
        still = {seq for seq, _ in left}
        if self._sub:
            still.add(self._seq)
        done, self._num_open = self._num_open - len(still), len(still)
        oldest_seq = min(self._seq, *still) if still else self._seq
        state = self._state(batcher)
        return LaneBatch(self.number, step, self._epoch if epoch is None else epoch, group, state, done, num_samples, oldest_seq)

    def _count_run(self, num_records: int) -> None:
        self._num_open += num_records
        self._counts["records"] += num_records
        self._counts["samples"] += num_records
        if self._seq + num_records > self._first_repeat:
            self._counts["repeated_records"] += min(num_records, self._seq + num_records - self._first_repeat)

    def _keep(self, seq: int, record: RecordId, samples: Sequence[Sample]) -> None:
        """Hold on to the samples that the saved buffer refers to."""
        assert self._refs is not None
        for sub, sample in enumerate(samples):
            if (seq, sub) in self._refs:
                self._items[seq, sub] = Item(sample, seq, sub, record)

    def _restore(self) -> Iterator[LaneBatch]:
        self._refs = None
        self._batcher.restore(self._saved, self._items)
        self._items = {}
        for group in self._batcher.ready():
            yield self._batch(group)


def _num_finished(group: Group, left: Collection[Ref]) -> int:
    """Return how many samples of a group have nothing left in the buffer."""
    return sum(item.ref not in left for item in group.items) if left else len(group.items)
