"""As many consecutive samples per micro-batch as fit a number of tokens.

lengths        3 5 4 | 9 2 | 1 ...        TokenBudget(18): padded, so a row costs as much as the longest
cost          3 x 5   2 x 9
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, fields

from aioloader.batching.admission import OVERFLOWS, Admission, Overflow, require_field
from aioloader.batching.counters import zero_counters
from aioloader.batching.due import DueGroups, as_group
from aioloader.batching.options import require_choice, require_positive
from aioloader.batching.restoring import find_item
from aioloader.errors import ConfigError
from aioloader.protocols import Group, Item, Json, Ref

__all__ = ["TokenBudget"]


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Groups consecutive samples whose cost together is at most `max_tokens`; never reorders.

    The cost is what the micro-batch takes once it is padded: number of samples x longest length, rounded up to `multiple_of`.
    With `padded=False` it is the sum of the lengths, for collators that lay samples end to end. A micro-batch is closed by the
    first sample that does not fit any more, at once where none could. Every sample is delivered exactly once, but for those
    left out: empty ones, and over-long ones with `overflow="drop"`; both are counted. The last group of an epoch is marked
    incomplete. Memory is bounded by one micro-batch.

    Samples are mappings; a sample's length is that of its 1-D `field`, or the field itself where that is a whole number, such as
    the sum of text and image tokens that preprocess counted.

    Attributes:
        max_tokens: The most that a micro-batch may cost. Only a sample that is `alone` may cost more.
        padded: Whether padding counts.
        max_samples: Samples per micro-batch at most; None for no limit.
        multiple_of: What the collator pads lengths to a multiple of (its `pad_to_multiple_of`); for padded cost only.
        overflow: What happens to a sample that costs more than `max_tokens` by itself: `"error"` raises `BatchError`, `"drop"`
            leaves it out, `"alone"` gives it a micro-batch of its own, in its place in the order (both are counted).
        field: The field that tells the length.

    Raises:
        ConfigError: An option is out of range or unknown, or no sample can fit.
    """

    max_tokens: int
    _: KW_ONLY
    padded: bool = True
    max_samples: int | None = None
    multiple_of: int = 1
    overflow: Overflow = "error"
    field: str = "input_ids"

    def __post_init__(self) -> None:
        """Check the options."""
        require_positive("TokenBudget(max_tokens=...)", self.max_tokens)
        if not isinstance(self.padded, bool):
            raise ConfigError("TokenBudget(padded=...)", expected="True or False", got=repr(self.padded), do="give a bool")
        if self.max_samples is not None:
            require_positive("TokenBudget(max_samples=...)", self.max_samples)
        require_positive("TokenBudget(multiple_of=...)", self.multiple_of)
        if self.multiple_of > 1 and not self.padded:
            do = "leave it out, or set padded=True"
            raise ConfigError("TokenBudget(multiple_of=...)", expected="1 where padding does not count", got=self.multiple_of, do=do)
        if self.multiple_of > self.max_tokens:
            do = "give what the collator pads to, and a budget of at least that"
            raise ConfigError("TokenBudget(multiple_of=...)", expected=f"<= max_tokens={self.max_tokens}", got=self.multiple_of, do=do)
        require_choice("TokenBudget(overflow=...)", self.overflow, OVERFLOWS)
        require_field("TokenBudget(field=...)", self.field)

    def start(self) -> _TokenBatcher:
        """Return a fresh batcher for one lane."""
        return _TokenBatcher(self)

    def fingerprint(self) -> dict[str, Json]:
        """Return the options that decide the groups."""
        return {"kind": "TokenBudget", **{one.name: getattr(self, one.name) for one in fields(self)}}

    def cost(self, num_samples: int, longest: int, total: int) -> int:
        """Return what samples cost together: their number, the longest of them and the sum of their lengths are enough to know."""
        return num_samples * (-(-longest // self.multiple_of) * self.multiple_of) if self.padded else total


class _TokenBatcher:
    """Holds the micro-batch that is still open and, between two groups of one push, those that are closed already."""

    __slots__ = ("_admission", "_due", "_items", "_lengths", "_longest", "_options", "_total")

    def __init__(self, options: TokenBudget) -> None:
        self._options = options
        rounding = options.multiple_of if options.padded else 1
        max_length = options.max_tokens // rounding * rounding
        self._admission = Admission("TokenBudget", options.field, max_length, options.overflow)
        self._due = DueGroups()
        self._open()

    def __repr__(self) -> str:
        cost = self._options.cost(len(self._items), self._longest, self._total)
        return f"<TokenBudget {cost}/{self._options.max_tokens} tokens in {len(self._items)} samples>"

    def push(self, item: Item) -> Iterator[Group]:
        if length := self._admission.admit(item):
            if self._items and not self._fits(length):
                self._close()
            self._add(item, length)
            if not self._fits(1):
                self._close()
        return self._due.hand_out() if self._due else iter(())

    def ready(self) -> Iterator[Group]:
        return self._due.hand_out()

    def finish(self) -> Iterator[Group]:
        yield from self._due.hand_out()
        if items := self._items:
            self._open()
            yield as_group(items, complete=False)

    def counters(self) -> dict[str, int]:
        return dict(self._admission.counters)

    def state(self) -> Json:
        still_open = [[item.seq, item.sub, length] for item, length in zip(self._items, self._lengths, strict=True)]
        return {"due": self._due.state(), "open": still_open, "counters": self.counters()}

    def refs(self, state: Json) -> Iterable[Ref]:
        return [*self._due.refs(state["due"]), *((seq, sub) for seq, sub, _ in state["open"])]

    def restore(self, state: Json, items: Mapping[Ref, Item]) -> None:
        found = [(find_item(items, (seq, sub)), length) for seq, sub, length in state["open"]]
        for item, length in found:
            self._admission.require_length(item, range(length, length + 1))
        self._due.restore(state["due"], items)
        self._admission.counters = zero_counters() | state["counters"]
        self._open()
        for item, length in found:
            self._add(item, length)

    def _open(self) -> None:
        self._items: list[Item] = []
        self._lengths: list[int] = []
        self._longest = self._total = 0

    def _fits(self, length: int) -> bool:
        """Return whether a further sample of this length fits the open micro-batch."""
        options, num_samples = self._options, len(self._items) + 1
        if options.max_samples is not None and num_samples > options.max_samples:
            return False
        return options.cost(num_samples, max(self._longest, length), self._total + length) <= options.max_tokens

    def _add(self, item: Item, length: int) -> None:
        self._items.append(item)
        self._lengths.append(length)
        self._longest = max(self._longest, length)
        self._total += length

    def _close(self) -> None:
        self._due.add(self._items)
        self._open()
