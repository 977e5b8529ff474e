"""Sampling: how the indices of a map-style dataset are dealt to data-parallel ranks. Plain arithmetic; needs no torch.

    position            0  1  2  3  4  5  6  7  8  9  10        of one global order, the same on every rank
    "stride", 4 ranks   r0 r1 r2 r3 r0 r1 r2 r3 -  -  -         what is consumed is a prefix: any number of ranks goes on with the rest
    "block", 4 ranks    r0 r0 r1 r1 r2 r2 r3 r3 -  -  -         contiguous slices: only 4 ranks can go on

The tail, here 8 to 10, is left out ("drop"), filled up with the order's beginning ("pad": position p is that of p % num_records), or given
to the first ranks ("keep").
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aioloader.errors import ConfigError, ResumeError
from aioloader.order.indexed import IndexedOrder
from aioloader.order.shuffle import Shuffle
from aioloader.protocols import Json

__all__ = ["IndexOrder", "Permute", "Sampling", "merge_states"]

STATE_VERSION = 1

Permute: TypeAlias = Callable[[int, int, int], NDArray[np.int64]]
"""(num_records, seed, epoch) -> int64[num_records], the whole order of an epoch."""

_CHOICES = {"tail": ("drop", "pad", "keep"), "mode": ("stride", "block")}
_NUM_HASHED = 4096
_MERGE = "DistributedSampler.merge: the states do not belong together"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an epoch is dealt out: a pure function of these options, the epoch and where in it a run begins.

    Attributes:
        num_records: Size of the dataset, 0 or more.
        dp_size: Ranks that share it.
        seed: Of the shuffle, together with the epoch.
        shuffle: Another order in each epoch; else the dataset's own.
        tail: What becomes of the records that do not divide evenly: "drop", "pad" or "keep".
        mode: "stride" or "block".
        order: Names the shuffle, in states and hashes.
        permute: Makes the whole order of an epoch; None: the keyed permutation, which takes no memory and seeks at once.

    Raises:
        ConfigError: An option is wrong.
    """

    num_records: int
    dp_size: int
    seed: int = 0
    shuffle: bool = True
    tail: str = "drop"
    mode: str = "stride"
    order: str = "keyed"
    permute: Permute | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        _check_count("dataset_size", self.num_records, do="pass len(dataset)")
        _check_count("seed", self.seed, do="pass the same non-negative seed on every rank")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(map(repr, choices))
                raise ConfigError(
                    f"DistributedSampler({name}=)", expected=f"one of {listed}", got=repr(getattr(self, name)), do="choose one"
                )

    def end(self, start: int = 0) -> int:
        """Return the position after the last one that is dealt out, in an epoch that goes on from `start`."""
        num_left = max(0, self.num_records - start)
        if self.tail == "drop":
            num_left -= num_left % self.dp_size
        elif self.tail == "pad":
            num_left += -num_left % self.dp_size
        return start + num_left

    def count(self, dp_rank: int, start: int = 0) -> int:
        """Return how many samples a rank gets from `start` on."""
        return max(0, self.end(start) - start - dp_rank + self.dp_size - 1) // self.dp_size

    def positions(self, dp_rank: int, start: int, first: int, last: int) -> NDArray[np.int64]:
        """Return int64[last - first]: where a rank's samples `first` to `last - 1` after `start` are in the order."""
        return self.dealt(np.arange(first, last) * self.dp_size + dp_rank + start)

    def dealt(self, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each turn; turn t, counted over the ranks, is rank t % dp_size's in an epoch that begins at 0."""
        if self.mode == "stride":
            return turns
        per_rank, num_longer = divmod(self.end(), self.dp_size)
        rounds, ranks = np.divmod(turns, self.dp_size)
        return ranks * per_rank + np.minimum(ranks, num_longer) + rounds

    def indices(self, epoch: int) -> IndexOrder:
        """Return the order of an epoch."""
        return IndexOrder(self, epoch)

    def digest(self, epoch: int) -> str:
        """Return a hash of the options and of the first 4096 indices of an epoch's order; equal on ranks that deal out alike."""
        first = self.indices(epoch)(np.arange(min(self.num_records, _NUM_HASHED)))
        return _hash({**self._options(), "dp_size": self.dp_size, "epoch": epoch}, first)

    def share_digest(self, epoch: int, dp_rank: int) -> str:
        """Return a hash of the first 4096 indices that a rank gets."""
        positions = self.positions(dp_rank, 0, 0, min(self.count(dp_rank), _NUM_HASHED))
        return _hash({"epoch": epoch}, self.indices(epoch)(positions))

    def state(self, epoch: int, offset: int) -> Json:
        """Return a state: all ranks have consumed the positions before `offset`. Equal on all ranks after the same number of samples."""
        return {"version": STATE_VERSION, "epoch": epoch, "offset": offset, "dp_size": self.dp_size, **self._options()}

    def read_state(self, state: Any) -> tuple[int, int]:
        """Return the epoch and the offset of a state.

        Raises:
            ResumeError: It is damaged or of another dataset, seed or mode, or of blocks of another number of ranks; names both sides.
        """
        here = self.state(0, 0)
        _check_shape(state, here)
        fixed = [name for name in here if name not in ("epoch", "offset", "dp_size")]
        found = [(name, state[name], here[name]) for name in fixed if state[name] != here[name]]
        do = "make the sampler with the options of the run that saved it, or start anew"
        if self.mode == "block" and state["dp_size"] != self.dp_size:
            found.append(("dp_size", state["dp_size"], self.dp_size))
            do = "resume blocks on as many ranks as saved them; a run in mode='stride' goes on with any number"
        if not found and state["offset"] >= max(1, self.num_records) + state["dp_size"]:
            found.append(("offset", state["offset"], f"at most {self.num_records} and a padded step"))
        if found:
            raise ResumeError(found, do=do, where="DistributedSampler.load_state_dict")
        return state["epoch"], state["offset"]

    def _options(self) -> dict[str, Json]:
        names = ("num_records", "seed", "shuffle", "order", "tail", "mode")
        return {name: getattr(self, name) for name in names}


class IndexOrder:
    """The order of one epoch: positions to indices of the dataset."""

    def __init__(self, sampling: Sampling, epoch: int) -> None:
        size = self._size = sampling.num_records
        self._order: IndexedOrder | None = None
        self._table: NDArray[np.int64] | None = None
        if sampling.shuffle and size:
            if sampling.permute is not None:
                self._table = sampling.permute(size, sampling.seed, epoch)
            else:  # what Loader(shuffle=Shuffle(shards_in_window=None)) makes of one shard
                self._order = IndexedOrder((size,), Shuffle(shards_in_window=None), sampling.seed, epoch)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return int64, of the shape of `positions`: the index at each; positions past the end begin again at 0."""
        if self._size:
            positions = positions % self._size
        if self._order is not None:
            return self._order.locate(positions)[1]
        return positions if self._table is None else self._table[positions]


def merge_states(states: Iterable[Json]) -> Json:
    """Return the one state of all ranks, for another number of them to go on from.

    Raises:
        ResumeError: States differ: ranks saved after different numbers of samples, or under different options.
    """
    given = list(states)
    if not given:
        raise ResumeError([("states", "none", "one of each rank")], do="pass the state of every rank", where=_MERGE)
    for state in given:
        _check_shape(state, given[0])
    found = [
        (f"state {number}: {name}", state[name], f"{given[0][name]!r}, as in state 0")
        for number, state in enumerate(given)
        for name in given[0]
        if state[name] != given[0][name]
    ]
    if found:
        do = "save on all ranks after the same step; each rank can still load its own state on as many ranks as there were"
        raise ResumeError(found, do=do, where=_MERGE)
    if len(given) not in (1, given[0]["dp_size"]):
        raise ResumeError([("states", len(given), given[0]["dp_size"])], do="pass the state of every rank", where=_MERGE)
    return given[0]


def _check_shape(state: Any, like: Mapping[str, Json]) -> None:
    where = "DistributedSampler.load_state_dict"
    if not isinstance(state, Mapping) or any(name not in state for name in like):
        raise ResumeError([("state", f"{state!r:.200}", f"a dict of {', '.join(like)}")], do="pass what state_dict() returned", where=where)
    for name in ("epoch", "offset", "dp_size"):
        if type(state[name]) is not int or state[name] < (name == "dp_size"):
            raise ResumeError([(name, state[name], "a count")], do="pass what state_dict() returned, unchanged", where=where)


def _check_count(name: str, value: object, *, do: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"DistributedSampler({name}=)", expected="an int of at least 0", got=f"{value!r:.200}", do=do)


def _hash(options: Mapping[str, Json], indices: NDArray[np.int64]) -> str:
    digest = hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(indices, "<i8").tobytes())
    return digest.hexdigest()
