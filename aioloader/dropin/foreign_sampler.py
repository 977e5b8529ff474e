"""Samplers of others, read by the engine: they move there without the dataset that they hold, and draw from generators of their own.

Imports torch only where a sampler draws from it: the engine's process does without, else.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
from collections.abc import Iterator
from typing import Any

import cloudpickle

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.order.permutation import permutation_key
from aioloader.pools.rng import SwappedSeeding
from aioloader.protocols import Json
from aioloader.state import fingerprint_hash

__all__ = ["ForeignSampler", "check_ranks", "is_dealt"]

_NUM_PREVIEWED = 64
_MAX_LENGTH = 10_000_000
"""Samplers draw a whole epoch at once, and this is done in the trainer."""


class ForeignSampler:
    """An iterable of what a copy of a sampler yields, the same for the same epoch: what a resumed run needs of it.

    `set_epoch` is passed on. A sampler that draws from a generator of torch's, or from the global one if it has none (`RandomSampler`,
    `WeightedRandomSampler`), gets one that is seeded for each epoch. Its `state_dict` is used where it has one.

    Args:
        sampler: An iterable of indices, or of lists of indices.
        dataset: Left out of the copy; a stand-in with its length takes its place.
        seed: For a sampler that has no generator of its own.

    Raises:
        ConfigError: The sampler cannot be copied.
    """

    def __init__(self, sampler: Any, dataset: Any, seed: int) -> None:
        self._with_epoch = callable(getattr(dataset, "set_epoch", None))
        self._seeds = [_seed_of(part, seed) for part in _parts(sampler)]
        self._epoch = 0
        self._size = _Size(len(dataset))
        self._adopt(_unpacked(_packed(sampler, dataset), self._size))

    def __iter__(self) -> Iterator[Any]:
        """Start a pass over the sampler."""
        for part, seed in zip(_parts(self._sampler), self._seeds, strict=True):
            if seed is not None:
                import torch

                part.generator = torch.Generator().manual_seed(permutation_key(seed, self._epoch, "sampler"))
        drawn = iter(self._sampler)
        return ((self._epoch, one) for one in drawn) if self._with_epoch else drawn

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler, and to the one inside a batch sampler."""
        self._epoch = epoch
        for part in _parts(self._sampler):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def preview_order(self, epoch: int) -> Json:
        """Return what an epoch begins with, None where that is not known; for ranks to compare. Global generators stay as they are."""
        if hasattr(type(self._sampler), "__len__") and len(self._sampler) > _MAX_LENGTH:
            return None
        copy: ForeignSampler = pickle.loads(pickle.dumps(self))
        seeding = SwappedSeeding(0)
        seeding.begin(epoch, ("sampler", 0))
        try:
            copy.set_epoch(epoch)
            text = json.dumps(list(itertools.islice(copy, _NUM_PREVIEWED)), default=str)
        except Exception:  # noqa: BLE001 - a mistake of the sampler shows where it is read
            return None
        finally:
            seeding.end()
        return {"starts": text[:40], "sha256": fingerprint_hash(text)[:16]}

    def __getstate__(self) -> dict[str, Any]:
        """Travel without what is bound to the sampler."""
        kept = {name: self.__dict__[name] for name in ("_with_epoch", "_seeds", "_epoch", "_size")}
        return {**kept, "sampler": _packed(self._sampler, self._size)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Bind the state of the sampler again."""
        sampler = _unpacked(state.pop("sampler"), state["_size"])
        self.__dict__.update(state)
        self._adopt(sampler)

    def _adopt(self, sampler: Any) -> None:
        self._sampler = sampler
        if callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None)):
            self.state_dict, self.load_state_dict = sampler.state_dict, sampler.load_state_dict


class _Size:
    """Stands for a dataset of which only the length matters."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        raise ConfigError(
            "DistributedDataLoader(sampler=)",
            expected="a sampler that needs only the length of the dataset, which stays with the workers",
            got=f"one that reads item {index!r} of it",
            do="let it read what it needs when it is made, lengths for example",
        )


class _WithoutDataset(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, dataset: Any) -> None:
        super().__init__(file, protocol=5)
        self._dataset = dataset

    def persistent_id(self, obj: Any) -> str | None:
        return "dataset" if obj is self._dataset else None


class _WithStandIn(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, stand_in: _Size) -> None:
        super().__init__(file)
        self._stand_in = stand_in

    def persistent_load(self, _name: str) -> _Size:
        return self._stand_in


def _packed(sampler: Any, dataset: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _WithoutDataset(buffer, dataset).dump(sampler)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            "DistributedDataLoader(sampler=)",
            expected="a sampler that can move to the engine",
            got=f"a {type(sampler).__qualname__}, which cannot ({error})",
            do="pass an object whose __iter__ makes the indices, not an iterator or an open file",
        ) from error
    return buffer.getvalue()


def _unpacked(packed: bytes, stand_in: _Size) -> Any:
    return _WithStandIn(io.BytesIO(packed), stand_in).load()


def is_dealt(sampler: Any) -> bool:
    """Return whether a sampler, or the one inside a batch sampler, yields one rank's part only."""
    return any(_ranks_of(part) is not None for part in _parts(sampler))


def check_ranks(where: str, sampler: Any, mesh: Mesh) -> None:
    """Check that a sampler which deals out by rank does so by the data-parallel coordinate.

    Raises:
        ConfigError: It has other ranks.
    """
    for part in _parts(sampler):
        ranks = _ranks_of(part)
        if ranks is not None and ranks != (mesh.dp_size, mesh.dp_rank):
            raise ConfigError(
                where,
                expected=f"num_replicas={mesh.dp_size}, rank={mesh.dp_rank}: the data-parallel coordinate of this mesh ({mesh.describe()})",
                got=f"a {type(part).__name__} with num_replicas={ranks[0]}, rank={ranks[1]}; by global rank, tensor- and "
                "pipeline-parallel peers would get different data",
                do="pass num_replicas=mesh.dp_size, rank=mesh.dp_rank to it, or use aioloader.DistributedSampler(len(dataset), mesh)",
            )


def _parts(sampler: Any) -> list[Any]:
    """Return a sampler and, of a batch sampler, the one inside."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]


def _ranks_of(sampler: Any) -> tuple[int, int] | None:
    ranks = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
    return ranks if all(type(one) is int for one in ranks) else None  # type: ignore[return-value]


def _seed_of(sampler: Any, seed: int) -> int | None:
    """Return what seeds a sampler that draws from a generator of torch's, None for any other."""
    if not hasattr(sampler, "generator"):
        return None
    return seed if sampler.generator is None else int(sampler.generator.initial_seed())
