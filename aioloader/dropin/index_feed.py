"""Where the indices of a map-style dataset come from: the project's own sampling, or a sampler of somebody else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aioloader.dropin.foreign_sampler import ForeignSampler, check_ranks, is_dealt
from aioloader.dropin.sampler import DistributedSampler
from aioloader.errors import ConfigError
from aioloader.options import check_int
from aioloader.order.already_sharded import AlreadySharded
from aioloader.order.mesh import Mesh
from aioloader.order.sampled import SampledIndices
from aioloader.order.sampling import Sampling
from aioloader.order.shuffle import Shuffle
from aioloader.sources import IterableSource
from aioloader.sources.by_index import FetchByIndex, Indices

__all__ = ["IndexFeed", "make_feed"]

_WHERE = "DistributedDataLoader"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFeed:
    """Indices for a `Loader`.

    Attributes:
        source: Of indices, or of lists of them.
        shuffle: For the loader to do.
        end: The loader's.
        num_positions: How many indices or lists an epoch deals out over all ranks; None where that is not known.
        batch_size: How many of them make a micro-batch.
    """

    source: Any
    shuffle: Shuffle | None = None
    end: str
    num_positions: int | None
    batch_size: int


def make_feed(
    dataset: Any,
    mesh: Mesh,
    num_lanes: int,
    sampler: Any,
    batch_sampler: Any,
    *,
    micro_batch_size: int | None,
    shuffle: bool | None,
    seed: int,
    tail: str | None,
    drop_last: bool | None,
) -> IndexFeed:
    """Return where indices come from, for the arguments of a `DistributedDataLoader`.

    Raises:
        ConfigError: Arguments do not go together, or a sampler deals to other ranks.
    """
    _refuse_contradictions(sampler, batch_sampler, micro_batch_size=micro_batch_size, shuffle=shuffle, drop_last=drop_last)
    if batch_sampler is not None:
        return _foreign(batch_sampler, "batch_sampler", mesh, dataset, seed, tail, batch_size=1, drops_partial=True)
    assert micro_batch_size is not None
    if isinstance(sampler, DistributedSampler):
        sampling = _sampling_of(sampler, len(dataset), mesh, num_lanes, tail)
    elif sampler is None:
        is_shuffled = shuffle is None or shuffle
        sampling = Sampling(
            num_records=len(dataset), dp_size=num_lanes, seed=seed, shuffle=is_shuffled, tail="drop" if tail is None else tail
        )
    else:
        drops = tail != "keep" if drop_last is None else drop_last
        return _foreign(sampler, "sampler", mesh, dataset, seed, tail, batch_size=micro_batch_size, drops_partial=drops)
    drops = sampling.tail == "drop" if drop_last is None else drop_last
    return _own(sampling, micro_batch_size, drops_partial=drops, with_epoch=FetchByIndex.needs_epoch(dataset))


def _own(sampling: Sampling, batch_size: int, *, drops_partial: bool, with_epoch: bool) -> IndexFeed:
    """Return the feed of a sampling.

    1. The keyed order with a tail that the engine has itself: what is left can be dealt to another number of lanes.
    2. Any other: the positions that it deals out are the epoch. They are the same number for each lane, but for "keep".
    """
    if sampling.tail == "keep" and drops_partial:
        do = "use tail='drop', or leave drop_last out"
        raise ConfigError(f"{_WHERE}(drop_last=)", expected="False with tail='keep', which delivers every sample", got=True, do=do)
    end = "drop" if drops_partial else "pad"
    is_keyed = sampling.permute is None and sampling.mode == "stride"
    if is_keyed and (sampling.tail == "keep" or (sampling.tail == "drop" and drops_partial)):
        order = Shuffle(shards_in_window=None, seed=sampling.seed) if sampling.shuffle else None
        source = Indices(sampling.num_records, with_epoch=with_epoch)
        return IndexFeed(source=source, shuffle=order, end=end, num_positions=sampling.num_records, batch_size=batch_size)
    return IndexFeed(source=SampledIndices(sampling, with_epoch=with_epoch), end=end, num_positions=sampling.end(), batch_size=batch_size)


def _foreign(
    sampler: Any, name: str, mesh: Mesh, dataset: Any, seed: int, tail: str | None, *, batch_size: int, drops_partial: bool
) -> IndexFeed:
    """Return the feed of somebody else's sampler: dealt out by position, unless it deals out by itself."""
    if tail not in (None, "drop", "keep"):
        do = "let the sampler repeat what it wants to, or use aioloader.DistributedSampler"
        raise ConfigError(f"{_WHERE}(tail=)", expected="'drop' or 'keep' with a sampler of your own", got=repr(tail), do=do)
    is_split = isinstance(sampler, AlreadySharded)
    inner = sampler.source if is_split else sampler
    if not hasattr(type(inner), "__iter__"):
        do = "pass a torch Sampler, a list, or any object with __iter__"
        raise ConfigError(f"{_WHERE}({name}=)", expected="an iterable that can be read again", got=repr(inner), do=do)
    check_ranks(f"{_WHERE}({name}=)", inner, mesh)
    is_split = is_split or is_dealt(inner)
    source: Any = IterableSource(ForeignSampler(inner, dataset, seed), name=type(inner).__qualname__)
    length = len(inner) * (mesh.dp_size if is_split else 1) if hasattr(type(inner), "__len__") else None
    return IndexFeed(
        source=AlreadySharded(source) if is_split else source,
        end="drop" if drops_partial and tail != "keep" else "pad",
        num_positions=length,
        batch_size=batch_size,
    )


def _sampling_of(sampler: DistributedSampler, size: int, mesh: Mesh, num_lanes: int, tail: str | None) -> Sampling:
    """Return what a `DistributedSampler` deals out, if it fits.

    Raises:
        ConfigError: It is of other data or of other ranks, or stands inside an epoch.
    """
    where = f"{_WHERE}(sampler=)"
    here, there = (mesh.dp_rank, mesh.dp_size), (sampler.mesh.dp_rank, sampler.mesh.dp_size)
    if here != there:
        expected, do = f"a sampler of dp rank {here[0]} of {here[1]}", "make it with the mesh of the loader"
        raise ConfigError(where, expected=expected, got=f"one of dp rank {there[0]} of {there[1]}", do=do)
    if sampler.sampling.num_records != size:
        got = f"one of {sampler.sampling.num_records}"
        raise ConfigError(where, expected=f"a sampler of {size} records", got=got, do="make it with len(dataset)")
    if sampler.state_dict()["offset"]:
        do = "load the state of the loader into the loader; a sampler that resumes by itself goes with a plain DataLoader"
        raise ConfigError(where, expected="a sampler at the beginning of an epoch", got=repr(sampler.state_dict()), do=do)
    if tail not in (None, sampler.sampling.tail):
        raise ConfigError(f"{_WHERE}(tail=)", expected=f"the sampler's, {sampler.sampling.tail!r}", got=repr(tail), do="leave it out")
    if sampler.sampling.mode == "block" and num_lanes != mesh.dp_size:
        do = "leave lanes out, or use mode='stride'"
        raise ConfigError(f"{_WHERE}(lanes=)", expected=f"{mesh.dp_size} with mode='block'", got=num_lanes, do=do)
    return replace(sampler.sampling, dp_size=num_lanes)


def _refuse_contradictions(
    sampler: Any, batch_sampler: Any, *, micro_batch_size: int | None, shuffle: bool | None, drop_last: bool | None
) -> None:
    if (sampler is not None or batch_sampler is not None) and shuffle is not None:
        raise ConfigError(f"{_WHERE}(shuffle=)", expected="None with a sampler, which decides it", got=shuffle, do="leave it out")
    if batch_sampler is None:
        if micro_batch_size is None:
            raise ConfigError(
                f"{_WHERE}(micro_batch_size=)", expected="a size, or a batch_sampler", got=None, do="pass the samples per batch"
            )
        check_int(f"{_WHERE}(micro_batch_size=)", micro_batch_size, at_least=1, do="pass the samples per batch")
        return
    given = {"sampler": sampler, "micro_batch_size": micro_batch_size, "drop_last": drop_last}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{_WHERE}({name}=)", expected="None with a batch_sampler, which decides it", got=value, do="leave it out")
