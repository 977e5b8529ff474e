"""Samples of similar length together, so that padding them wastes little.

lengths    3 17 4 2 30 5 ...        Bucket([8, 32], batch_size=(4, 2))
groups     17 30 | 3 4 2 5 | ...
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from aioloader.batching.admission import OVERFLOWS, Admission, Overflow, require_field
from aioloader.batching.counters import zero_counters
from aioloader.batching.due import DueGroups, as_group, as_refs
from aioloader.batching.options import require_choice, require_positive
from aioloader.batching.restoring import find_item
from aioloader.errors import ConfigError
from aioloader.protocols import Group, Item, Json, Ref

__all__ = ["Bucket"]

_LOOKAHEAD_BATCHES = 8
"""Micro-batches of the largest size that may wait by default: one for each of the usual number of buckets."""
_AGE_BATCHES = 32
"""In 32 micro-batches' worth of samples, a bucket that gets one sample in 32 fills; a rarer one goes out in part."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Groups samples of similar length: bucket i takes lengths up to `boundaries[i]` and above those of the bucket before.

    A bucket that is full becomes a micro-batch. Exactly one of `batch_size` and `max_tokens` says when that is. Samples of a
    bucket keep their order, and the order of groups depends on the samples only. Every sample is delivered exactly once, but for
    those left out: empty ones, and over-long ones with `overflow="drop"`; both are counted.

    Two limits let a bucket out before it is full, as a complete group of fewer samples (counted as `early_groups`): no sample
    waits for more than `max_age` further samples, and no more than `lookahead` samples wait after a push, else the bucket
    with the oldest one goes. They bound memory, the state's list of references, and what is read again on resume. What waits at the
    end of an epoch comes out as one incomplete group for each bucket, oldest first; `end="drop"` drops those.

    A sample's length is that of its 1-D `field`, or the field itself where that is a whole number.

    Attributes:
        boundaries: Longest length of each bucket, strictly rising.
        batch_size: Samples per micro-batch: one number, or one for each bucket.
        max_tokens: Micro-batches hold `max_tokens // boundaries[i]` samples: as many as fit when padded to the boundary. Choose
            boundaries that are multiples of what the collator pads to, or padding can exceed it.
        lookahead: Samples that wait in all buckets together; by default 8 times the largest micro-batch, and not less than that.
        max_age: By default 32 times the largest micro-batch. Samples that are left out do not count.
        overflow: What happens to a sample longer than the last boundary: `"error"` raises `BatchError`, `"drop"` leaves it out,
            `"alone"` gives it a micro-batch of its own at once (both are counted).
        field: The field that tells the length.

    Raises:
        ConfigError: An option is out of range or unknown, or they contradict each other.
    """

    boundaries: Sequence[int]
    _: KW_ONLY
    batch_size: int | Sequence[int] | None = None
    max_tokens: int | None = None
    lookahead: int | None = None
    max_age: int | None = None
    overflow: Overflow = "error"
    field: str = "input_ids"

    def __post_init__(self) -> None:
        """Check the options; lists become tuples."""
        self._check_boundaries()
        if (self.batch_size is None) == (self.max_tokens is None):
            got = "neither" if self.batch_size is None else "both"
            raise ConfigError("Bucket(batch_size=..., max_tokens=...)", expected="one of the two", got=got, do="say when a bucket is full")
        if self.max_tokens is None:
            self._check_batch_size()
        else:
            self._check_max_tokens(self.max_tokens)
        if self.lookahead is not None:
            self._check_lookahead(self.lookahead)
        if self.max_age is not None:
            require_positive("Bucket(max_age=...)", self.max_age)
        require_choice("Bucket(overflow=...)", self.overflow, OVERFLOWS)
        require_field("Bucket(field=...)", self.field)

    def start(self) -> _BucketBatcher:
        """Return a fresh batcher for one lane."""
        return _BucketBatcher(self)

    def fingerprint(self) -> dict[str, Json]:
        """Return the options that decide the groups, defaults resolved."""
        return {
            "kind": "Bucket",
            "boundaries": list(self.boundaries),
            "capacities": list(self.capacities),
            "lookahead": self._num_lookahead,
            "max_age": self._num_max_age,
            "overflow": self.overflow,
            "field": self.field,
        }

    @property
    def capacities(self) -> tuple[int, ...]:
        """Return how many samples fill each bucket."""
        if self.max_tokens is not None:
            return tuple(self.max_tokens // boundary for boundary in self.boundaries)
        size = self.batch_size
        assert size is not None
        return (size,) * len(self.boundaries) if isinstance(size, int) else tuple(size)

    @property
    def _num_lookahead(self) -> int:
        """Return `lookahead` or its default."""
        return self.lookahead or _LOOKAHEAD_BATCHES * max(self.capacities)

    @property
    def _num_max_age(self) -> int:
        """Return `max_age` or its default."""
        return self.max_age or _AGE_BATCHES * max(self.capacities)

    def _check_boundaries(self) -> None:
        where = "Bucket(boundaries=...)"
        object.__setattr__(self, "boundaries", _as_tuple(where, self.boundaries))
        if any(high <= low for low, high in itertools.pairwise(self.boundaries)):
            raise ConfigError(where, expected="strictly rising lengths", got=self.boundaries, do="sort them and leave each one in once")

    def _check_batch_size(self) -> None:
        where, size = "Bucket(batch_size=...)", self.batch_size
        if isinstance(size, int):
            require_positive(where, size)
            return
        object.__setattr__(self, "batch_size", _as_tuple(where, size))
        if len(self.capacities) != len(self.boundaries):
            expected, do = f"one number or {len(self.boundaries)}", "give one for each boundary"
            raise ConfigError(where, expected=expected, got=len(self.capacities), do=do)

    def _check_max_tokens(self, max_tokens: int) -> None:
        require_positive("Bucket(max_tokens=...)", max_tokens)
        if max_tokens < self.boundaries[-1]:
            expected, do = f"at least the last boundary, {self.boundaries[-1]}", "raise it or leave out that bucket"
            raise ConfigError("Bucket(max_tokens=...)", expected=expected, got=max_tokens, do=do)

    def _check_lookahead(self, lookahead: int) -> None:
        require_positive("Bucket(lookahead=...)", lookahead)
        if lookahead < max(self.capacities):
            expected, do = f"at least the largest micro-batch, {max(self.capacities)}", "raise it, or no such micro-batch can fill"
            raise ConfigError("Bucket(lookahead=...)", expected=expected, got=lookahead, do=do)


def _as_tuple(where: str, values: object) -> tuple[int, ...]:
    """Return one or more positive ints as a tuple."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise ConfigError(where, expected="one or more ints", got=repr(values), do="give a list of positive whole numbers")
    for value in values:
        require_positive(where, value)
    return tuple(values)


class _Waiting(NamedTuple):
    """What a bucket holds: the samples and which of all pushes brought the first."""

    arrival: int
    items: list[Item]


class _BucketBatcher:
    """Holds the samples of each bucket that is not full and, between two groups of one push, the groups that are settled already.

    Buckets leave whole and come back at the end of the dict, so it is always sorted by oldest sample: O(1) to find the oldest.
    """

    __slots__ = ("_admission", "_boundaries", "_buckets", "_capacities", "_due", "_lookahead", "_max_age", "_num_pushed", "_num_waiting")

    def __init__(self, options: Bucket) -> None:
        self._boundaries = options.boundaries
        self._capacities = (*options.capacities, 1)  # the last for those that are alone
        self._lookahead = options._num_lookahead
        self._max_age = options._num_max_age
        self._admission = Admission("Bucket", options.field, options.boundaries[-1], options.overflow)
        self._due = DueGroups()
        self._buckets: dict[int, _Waiting] = {}
        self._num_waiting = 0
        self._num_pushed = 0

    def __repr__(self) -> str:
        return f"<Bucket {self._num_waiting}/{self._lookahead} samples in {len(self._buckets)} buckets>"

    def push(self, item: Item) -> Iterator[Group]:
        if length := self._admission.admit(item):
            self._place(item, bisect_left(self._boundaries, length))
        return self._due.hand_out() if self._due else iter(())

    def ready(self) -> Iterator[Group]:
        return self._due.hand_out()

    def finish(self) -> Iterator[Group]:
        yield from self._due.hand_out()
        while self._buckets:
            yield as_group(self._take(next(iter(self._buckets))), complete=False)

    def counters(self) -> dict[str, int]:
        return dict(self._admission.counters)

    def state(self) -> Json:
        waiting = [[index, self._num_pushed - first, as_refs(items)] for index, (first, items) in self._buckets.items()]
        return {"due": self._due.state(), "buckets": waiting, "counters": self.counters()}

    def refs(self, state: Json) -> Iterable[Ref]:
        return [*self._due.refs(state["due"]), *((seq, sub) for _, _, refs in state["buckets"] for seq, sub in refs)]

    def restore(self, state: Json, items: Mapping[Ref, Item]) -> None:
        buckets: dict[int, _Waiting] = {}
        for index, age, refs in state["buckets"]:
            lengths = range(self._boundaries[index - 1] + 1 if index else 1, self._boundaries[index] + 1)
            found = [find_item(items, (seq, sub)) for seq, sub in refs]
            for item in found:
                self._admission.require_length(item, lengths)
            buckets[index] = _Waiting(-age, found)
        self._due.restore(state["due"], items)
        self._admission.counters = zero_counters() | state["counters"]
        self._buckets, self._num_pushed = buckets, 0
        self._num_waiting = sum(len(items) for _, items in buckets.values())

    def _place(self, item: Item, index: int) -> None:
        """Put a sample in its bucket and settle the groups that follow from it: the full bucket first, then what is overdue."""
        self._num_pushed += 1
        self._num_waiting += 1
        waiting = self._buckets.get(index)
        if waiting is None:
            waiting = self._buckets[index] = _Waiting(self._num_pushed, [])
        waiting.items.append(item)
        if len(waiting.items) == self._capacities[index]:
            self._due.add(self._take(index))
        while self._buckets:
            oldest = next(iter(self._buckets))
            if self._num_waiting <= self._lookahead and self._num_pushed - self._buckets[oldest].arrival < self._max_age:
                return
            self._admission.counters["early_groups"] += 1
            self._due.add(self._take(oldest))

    def _take(self, index: int) -> list[Item]:
        items = self._buckets.pop(index).items
        self._num_waiting -= len(items)
        return items
