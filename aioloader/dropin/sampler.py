"""`DistributedSampler`: which indices of a map-style dataset this rank gets, by its data-parallel coordinate; for any DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from aioloader import options
from aioloader.errors import ConfigError, ResumeError
from aioloader.order.mesh import Mesh
from aioloader.order.sampling import Sampling, merge_states
from aioloader.protocols import Json

__all__ = ["DistributedSampler", "torch_permutation"]

_AT_ONCE = 4096
"""Indices made in one go: enough for NumPy to pay, a few ten microseconds."""


class DistributedSampler(Sampler[int]):
    """Yields the indices of this rank, in an order that all ranks compute alike: nothing is communicated, no global generator is touched.

    Ranks that differ on another axis than the data-parallel one yield the same indices. Goes as `sampler=` into torch's DataLoader, into
    StatefulDataLoader, which resumes it exactly, and into `DistributedDataLoader`.

    Epochs count themselves: after an iteration that came to its end, the next one is of the next epoch, whether `set_epoch` was called or
    not. One that was left early begins again.

    With a plain DataLoader, call `advance` with the number of samples of each batch that is done with: a DataLoader asks for indices long
    before it delivers what they stand for. `state_dict` then resumes after that batch.

    Args:
        dataset_size: Number of records, `len(dataset)`.
        mesh: This rank's coordinates. There is no default: the global rank would be wrong with tensor or pipeline parallelism.
        seed: Of the shuffle, with the epoch; the same on every rank.
        shuffle: Another order in every epoch; else the dataset's.
        tail: "drop" leaves out what does not divide evenly (`dropped`). "pad" repeats the order's beginning until it does (`repeated`),
            even where there are fewer samples than ranks. "keep" neither drops nor repeats, for evaluation: ranks may differ by one sample,
            so that nothing collective may depend on their number.
        mode: "stride": position p of the order belongs to rank p % dp_size, and any number of ranks can go on with what is left. "block": a
            contiguous part of the order for each rank.
        order: "keyed": a permutation that is computed where it is needed, in no memory. "torch": that of
            `torch.utils.data.DistributedSampler` with the same seed (a list of the whole epoch; seed + 1 in epoch 0 is seed in epoch 1).

    Raises:
        ConfigError: An argument is wrong.
    """

    def __init__(
        self,
        dataset_size: int,
        mesh: Mesh,
        *,
        seed: int = 0,
        shuffle: bool = True,
        tail: str = "drop",
        mode: str = "stride",
        order: str = "keyed",
    ) -> None:
        if not isinstance(mesh, Mesh):
            do = "pass Mesh.from_env() for a job that is data parallel only, else one with this rank's coordinates on each axis"
            raise ConfigError("DistributedSampler(mesh=)", expected="a Mesh", got=repr(mesh), do=do)
        options.check_choice("DistributedSampler(order=)", order, ("keyed", "torch"))
        self.mesh = mesh
        self.sampling = Sampling(
            num_records=dataset_size,
            dp_size=mesh.dp_size,
            seed=seed,
            shuffle=bool(shuffle),
            tail=tail,
            mode=mode,
            order=order,
            permute=torch_permutation if order == "torch" else None,
        )
        self._place = _Place(0, 0)

    def __iter__(self) -> _Pass:
        """Start a pass: from a state that was loaded, else from the beginning of the epoch."""
        place = self._place
        if place.is_finished or (place.is_used_up and not place.is_asked_for):
            place = self._place = _Place(place.epoch + 1, 0)
        place.num_done = 0
        place.newest = _Pass(self, place.epoch, place.start)
        return place.newest

    def __len__(self) -> int:
        """Return the samples of this rank in a whole epoch."""
        return self.sampling.count(self.mesh.dp_rank)

    @property
    def epoch(self) -> int:
        """Return the epoch of the running pass, or of the next one."""
        return self._place.epoch

    @property
    def dropped(self) -> list[int]:
        """Return the indices that no rank gets in this epoch: fewer than dp_size of them, and none unless `tail="drop"`."""
        end, size = self.sampling.end(self._place.start), self.sampling.num_records
        return self._indices(range(end, size)) if self.sampling.tail == "drop" else []

    @property
    def repeated(self) -> list[int]:
        """Return the indices that are given once more at the end of this epoch, over all ranks; none unless `tail="pad"`."""
        return self._indices(range(max(self._place.start, self.sampling.num_records), self.sampling.end(self._place.start)))

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one of the next pass. A loaded state that stands in this epoch is kept: only another epoch begins at 0.

        A state that was saved at the end of this very epoch then has nothing left to give.
        """
        options.check_int("DistributedSampler.set_epoch", epoch, at_least=0, do="count epochs from 0")
        if epoch != self._place.epoch or self._place.is_finished:
            self._place = _Place(epoch, 0)
        self._place.is_asked_for = True

    def advance(self, num_samples: int) -> None:
        """Note that so many more samples of this rank are done with.

        Raises:
            ConfigError: The pass does not have so many left.
        """
        options.check_int("DistributedSampler.advance", num_samples, at_least=0, do="pass the size of the batch that was trained on")
        num_left = self.sampling.count(self.mesh.dp_rank, self._place.start) - self._place.num_done
        if num_samples > num_left:
            do = "pass the true size of each batch once, the last one may be smaller"
            raise ConfigError("DistributedSampler.advance", expected=f"at most the {num_left} samples left", got=num_samples, do=do)
        self._place.num_done += num_samples

    def state_dict(self) -> Json:
        """Return the place after the samples that `advance` was told of.

        The same on all ranks that are after the same step: then the state of any rank, loaded on all ranks, goes on with another number of
        them, each record once. What ranks that saved after different numbers of samples can do is load each its own.
        """
        place = self._place
        return self._state_after(place.epoch, place.start, place.num_done)

    def load_state_dict(self, state: Json) -> None:
        """Load a state for the next pass. In mode "stride", it may be of another number of ranks: `merge` checks that it is that of all.

        Raises:
            ResumeError: It is of another dataset size, seed, order, tail or mode; names both sides.
        """
        epoch, offset = self.sampling.read_state(state)
        self._place = _Place(epoch, offset)
        if self.sampling.tail != "keep":  # where some ranks have one sample less, they must not go on to the next epoch alone
            self._place.is_used_up = 0 < offset >= self.sampling.end(offset)

    @staticmethod
    def merge(states: Iterable[Json]) -> Json:
        """Return the one state of all ranks, from which another number of them can go on.

        Raises:
            ResumeError: A rank is missing, or ranks saved after different steps.
        """
        return merge_states(states)

    def order_hash(self) -> str:
        """Return a hash of the options and of this epoch's order: ranks whose hashes differ would repeat and omit samples."""
        return self.sampling.digest(self._place.epoch)

    def share_hash(self) -> str:
        """Return a hash of this rank's indices: equal on ranks of one data-parallel coordinate, different across them."""
        return self.sampling.share_digest(self._place.epoch, self.mesh.dp_rank)

    def __repr__(self) -> str:
        """Return what it deals out, and where it stands."""
        deal = self.sampling
        return f"<DistributedSampler of {deal.num_records}, {self.mesh.describe()}, {deal.tail}, {deal.mode}, epoch {self._place.epoch}>"

    def _indices(self, positions: range) -> list[int]:
        found: list[int] = self.sampling.indices(self._place.epoch)(np.asarray(positions, np.int64)).tolist()
        return found

    def _state_after(self, epoch: int, start: int, num_samples: int) -> Json:
        return self.sampling.state(epoch, start + num_samples * self.sampling.dp_size)

    def _came_to_its_end(self, one: _Pass) -> None:
        """Note that a pass has given its last index; only the newest one counts."""
        if one is self._place.newest:
            self._place.is_finished = True


@dataclass(slots=True)
class _Place:
    """Where the next pass begins, how much of the running one is done with, and whether it is the one that counts."""

    epoch: int
    start: int
    num_done: int = 0
    is_finished: bool = False
    is_used_up: bool = False
    is_asked_for: bool = False
    newest: _Pass | None = None


class _Pass(Iterator[int]):
    """One pass. Its own state is as of the indices it has given, for loaders that count these (StatefulDataLoader does)."""

    def __init__(self, sampler: DistributedSampler, epoch: int, start: int) -> None:
        self._sampler = sampler
        self._epoch = epoch
        self._order = sampler.sampling.indices(epoch)
        self._begin(start)

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> int:
        if self._at == len(self._made):
            self._make()
        index = self._made[self._at]
        self._at += 1
        if self._at == len(self._made) and self._num_made == self._stop:  # whoever counts batches does not ask for one more
            self._sampler._came_to_its_end(self)
        return index

    def state_dict(self) -> Json:
        return self._sampler._state_after(self._epoch, self._start, self._num_made - len(self._made) + self._at)

    def load_state_dict(self, state: Json) -> None:
        epoch, offset = self._sampler.sampling.read_state(state)
        if epoch != self._epoch:
            where, do = "iter(DistributedSampler).load_state_dict", "load the state of the sampler first, then make the iterator"
            raise ResumeError([("epoch", epoch, self._epoch)], do=do, where=where)
        self._begin(offset)

    def _begin(self, start: int) -> None:
        self._start = start
        self._stop = self._sampler.sampling.count(self._sampler.mesh.dp_rank, start)
        self._made: list[int] = []
        self._at = 0
        self._num_made = 0

    def _make(self) -> None:
        """Make the next indices; raise StopIteration after the last."""
        last = min(self._num_made + _AT_ONCE, self._stop)
        if self._num_made == last:
            self._sampler._came_to_its_end(self)
            raise StopIteration
        sampling, rank = self._sampler.sampling, self._sampler.mesh.dp_rank
        if sampling.mode == "stride":
            positions = sampling.positions(rank, self._start, self._num_made, last)
        else:  # blocks begin where they began in the epoch
            done = self._start // sampling.dp_size
            positions = sampling.positions(rank, 0, done + self._num_made, done + last)
        self._made, self._at, self._num_made = self._order(positions).tolist(), 0, last


def torch_permutation(num_records: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return int64[num_records], the order that `torch.utils.data.DistributedSampler` has."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order: NDArray[np.int64] = torch.randperm(num_records, generator=generator).numpy()
    return order
