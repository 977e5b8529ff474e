"""`DistributedSampler` as torch's loaders use it: who gets what, epochs, state, resharding."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

from aioloader import ConfigError, Mesh, ResumeError
from aioloader.dropin.sampler import DistributedSampler


def mesh(dp_rank: int, dp_size: int) -> Mesh:
    return Mesh(dp_rank=dp_rank, dp_size=dp_size)


def samplers(size: int, dp_size: int, **options: Any) -> list[DistributedSampler]:
    return [DistributedSampler(size, mesh(rank, dp_size), **options) for rank in range(dp_size)]


def flat(parts: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def batches(sampler: DistributedSampler, batch_size: int, **options: Any) -> list[list[int]]:
    return [batch.tolist() for batch in DataLoader(range(sampler.sampling.num_records), batch_size, sampler=sampler, **options)]  # type: ignore[arg-type]


def test_the_mesh_has_no_default() -> None:
    """C042."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'mesh'"):
        DistributedSampler(10)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"DistributedSampler\(mesh=\): expected a Mesh, got 3"):
        DistributedSampler(10, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"order=\): expected one of 'keyed', 'torch', got 'random'"):
        DistributedSampler(10, Mesh(), order="random")


@pytest.mark.parametrize("size", [1003, 1000, 103, 5])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_torch_order_is_that_of_torch_on_a_mesh_that_is_data_parallel_only(size: int, drop_last: bool) -> None:
    """D002, C046."""
    for rank, ours in enumerate(samplers(size, 4, seed=42, order="torch", tail="drop" if drop_last else "pad")):
        theirs = TorchSampler(range(size), num_replicas=4, rank=rank, seed=42, drop_last=drop_last)  # type: ignore[arg-type, var-annotated]
        for epoch in (0, 3):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


def test_three_samples_for_eight_ranks_are_one_each_when_padded() -> None:
    """C046."""
    dealt = [list(sampler) for sampler in samplers(3, 8, tail="pad", shuffle=False)]
    assert dealt == [[0], [1], [2], [0], [1], [2], [0], [1]]
    assert samplers(3, 8, tail="pad", shuffle=False)[0].repeated == [0, 1, 2, 0, 1]


def test_what_is_dropped_and_what_is_repeated_is_told() -> None:
    """C045, C046, K67."""
    dropping = samplers(103, 4)
    dealt = [list(sampler) for sampler in dropping]
    assert [len(one) for one in dealt] == [25] * 4
    assert len(dropping[0].dropped) == 3
    assert sorted([*flat(dealt), *dropping[0].dropped]) == list(range(103))
    assert dropping[0].repeated == []
    padding = samplers(103, 4, tail="pad")
    dealt = [list(sampler) for sampler in padding]
    assert [len(one) for one in dealt] == [26] * 4
    assert len(padding[0].repeated) == 1
    assert sorted(flat(dealt)) == sorted([*range(103), *padding[0].repeated])
    assert padding[0].dropped == []


def test_evaluation_counts_each_sample_once() -> None:
    """K65, K67: accuracy over 10 samples of which 2 are right is 0.2 on 3 ranks too."""
    dealt = [list(sampler) for sampler in samplers(10, 3, tail="keep", shuffle=False)]
    assert [len(one) for one in dealt] == [4, 3, 3]
    indices = flat(dealt)
    assert sum(index in (0, 1) for index in indices) / len(indices) == 0.2
    assert sorted(flat(samplers(103, 4, tail="keep"))) == list(range(103))


def test_peers_of_one_data_parallel_coordinate_get_the_same_and_global_ranks_would_not() -> None:
    """C038, C039: dp 2 x tp 2, then the same ranks keyed by global rank, then by a seed of their own."""
    right = [DistributedSampler(40, Mesh(dp_rank=rank // 2, dp_size=2, tp_rank=rank % 2, tp_size=2)) for rank in range(4)]
    first, peer, second, _ = [list(sampler) for sampler in right]
    assert first == peer
    assert not set(first) & set(second)
    assert len({sampler.order_hash() for sampler in right}) == 1
    assert right[0].share_hash() == right[1].share_hash() != right[2].share_hash()

    wrong = samplers(40, 4)
    assert list(wrong[0]) != list(wrong[1])
    assert wrong[0].share_hash() != wrong[1].share_hash(), "a start-up check inside the tensor-parallel group sees it"
    assert wrong[0].order_hash() != right[0].order_hash()

    by_rank = [DistributedSampler(40, mesh(rank, 4), seed=rank) for rank in range(4)]
    assert len({sampler.order_hash() for sampler in by_rank}) == 4


def test_no_global_generator_is_read_or_moved_and_nothing_is_communicated() -> None:
    """C040, C041."""
    assert not dist.is_initialized(), "a collective would raise"
    for order in ("keyed", "torch"):
        torch.manual_seed(999)
        random.seed(1)
        np.random.seed(2)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        drawn = list(DistributedSampler(50, mesh(1, 2), order=order))
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
        torch.manual_seed(5)
        random.seed(6)
        np.random.seed(7)
        assert list(DistributedSampler(50, mesh(1, 2), order=order)) == drawn


def test_epochs_count_themselves_in_a_dataloader() -> None:
    """D004, K14: the second loop is epoch 1, without anybody calling `set_epoch`."""
    sampler = DistributedSampler(100, mesh(0, 2))
    epochs = [batches(sampler, 10) for _ in range(3)]
    assert sampler.epoch == 2
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    for epoch in (2, 0, 1, 1):
        sampler.set_epoch(epoch)
        assert batches(sampler, 10) == epochs[epoch]


def test_a_loop_that_counts_its_batches_and_does_not_wait_for_the_end_goes_on_too() -> None:
    sampler = DistributedSampler(100, mesh(0, 2))
    loader: DataLoader[int] = DataLoader(range(100), 10, sampler=sampler)  # type: ignore[arg-type]
    first = [batch.tolist() for _, batch in zip(range(len(loader)), loader, strict=False)]
    assert first != batches(sampler, 10)
    assert sampler.epoch == 1


def test_a_pass_that_was_left_early_begins_again() -> None:
    sampler = DistributedSampler(100, mesh(0, 2))
    first = next(iter(sampler))
    assert next(iter(sampler)) == first
    assert sampler.epoch == 0


def test_an_older_pass_that_comes_to_its_end_does_not_end_the_newer_one() -> None:
    sampler = DistributedSampler(10, mesh(0, 2))
    older = iter(sampler)
    newer = iter(sampler)
    list(older)
    next(newer)
    iter(sampler)
    assert sampler.epoch == 0


@pytest.mark.parametrize("tail", ["drop", "pad", "keep"])
@pytest.mark.parametrize("mode", ["stride", "block"])
@pytest.mark.parametrize("order", ["keyed", "torch"])
def test_a_state_goes_on_after_the_samples_that_were_acknowledged(tail: str, mode: str, order: str) -> None:
    """C016, C020, F8: the batch that was not acknowledged comes again; `set_epoch` of the restored epoch keeps the place."""
    options: dict[str, Any] = {"tail": tail, "mode": mode, "order": order}
    whole = list(DistributedSampler(50, mesh(1, 4), **options))
    for done in range(len(whole)):
        sampler = DistributedSampler(50, mesh(1, 4), **options)
        batches(sampler, 4)
        sampler.advance(done)
        resumed = DistributedSampler(50, mesh(1, 4), **options)
        resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        resumed.set_epoch(0)
        assert list(resumed) == whole[done:]
        assert resumed.epoch == 0
        resumed.set_epoch(0)
        assert list(resumed) == whole, "the state was for one pass"


def test_only_another_epoch_discards_a_restored_place() -> None:
    """C013."""
    sampler = DistributedSampler(50, mesh(1, 2))
    whole = list(sampler)
    sampler.load_state_dict(sampler.sampling.state(0, 20))
    sampler.set_epoch(1)
    second = list(sampler)
    assert len(second) == len(whole)
    assert second != whole
    sampler.set_epoch(0)
    assert list(sampler) == whole


def test_a_state_of_the_end_of_an_epoch_begins_the_next_one_unless_that_epoch_is_asked_for() -> None:
    sampler = DistributedSampler(50, mesh(1, 2))
    list(sampler)
    sampler.advance(25)
    state = sampler.state_dict()
    second = list(sampler)
    resumed = DistributedSampler(50, mesh(1, 2))
    resumed.load_state_dict(state)
    assert list(resumed) == second
    assert resumed.epoch == 1
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert list(resumed) == []
    resumed.set_epoch(1)
    assert list(resumed) == second


@pytest.mark.parametrize(("done", "left"), [(3, [1, 0, 0]), (4, [0, 0, 0])])
def test_a_kept_tail_never_goes_on_to_the_next_epoch_by_itself(done: int, left: list[int]) -> None:
    """Ranks have 4, 3 and 3: one that has nothing left does not know whether another has."""
    found = []
    for sampler in samplers(10, 3, tail="keep"):
        sampler.advance(min(done, len(sampler)))
        resumed = DistributedSampler(10, sampler.mesh, tail="keep")
        resumed.load_state_dict(sampler.state_dict())
        found.append((len(list(resumed)), resumed.epoch))
    assert found == [(num, 0) for num in left]


def test_samples_are_acknowledged_once() -> None:
    """C020: a last batch of 3 counts 3."""
    sampler = DistributedSampler(22, mesh(0, 2))
    sizes = [len(batch) for batch in batches(sampler, 4)]
    assert sizes == [4, 4, 3]
    for size in sizes:
        sampler.advance(size)
    assert sampler.state_dict()["offset"] == 22
    with pytest.raises(ConfigError, match="expected at most the 0 samples left, got 1"):
        sampler.advance(1)
    with pytest.raises(ConfigError, match="an int of at least 0, got -1"):
        sampler.advance(-1)


@pytest.mark.parametrize("steps", [(0, 0), (1, 0), (3, 2), (7, 5), (12, 1)])
def test_a_run_goes_on_with_8_ranks_and_then_with_2(steps: tuple[int, int]) -> None:
    """C048, C049: 4 -> 8 -> 2; 103 samples, of which the last deal leaves out at most one."""
    ranks = samplers(103, 4, seed=9)
    seen: list[int] = []
    for next_size, num in zip((8, 2), steps, strict=True):
        states = []
        for rank in ranks:
            indices = iter(rank)
            seen += [next(indices) for _ in range(num)]
            rank.advance(num)
            states.append(rank.state_dict())
        assert all(state == states[0] for state in states)
        ranks = samplers(103, next_size, seed=9)
        for rank in ranks:
            rank.load_state_dict(DistributedSampler.merge(states))
    dropped = ranks[0].dropped
    left = [list(rank) for rank in ranks]
    assert len(left[0]) == len(left[1])
    assert len(dropped) <= 1
    assert sorted(seen + left[0] + left[1] + dropped) == list(range(103))


def test_ranks_that_saved_after_different_steps_go_on_each_by_itself_only() -> None:
    ranks = samplers(40, 4)
    whole = [list(rank) for rank in samplers(40, 4)]
    for number, rank in enumerate(ranks):
        rank.advance(number)
    states = [rank.state_dict() for rank in ranks]
    with pytest.raises(ResumeError, match="state 1: offset"):
        DistributedSampler.merge(states)
    for number, rank in enumerate(samplers(40, 4)):
        rank.load_state_dict(states[number])
        assert list(rank) == whole[number][number:]


def test_blocks_are_not_dealt_anew() -> None:
    """C015, C048."""
    state = DistributedSampler(24, mesh(0, 4), mode="block").state_dict()
    with pytest.raises(ResumeError, match="dp_size: expected 8, got 4"):
        DistributedSampler(24, mesh(0, 8), mode="block").load_state_dict(state)


def test_the_iterator_has_a_state_of_its_own_for_loaders_that_count_indices() -> None:
    """What torchdata's BatchSampler does: the sampler's state, a new iterator, the iterator's state."""
    sampler = DistributedSampler(20_000, mesh(1, 2))
    for epoch, drawn in ((1, 0), (1, 5000), (1, 10_000)):
        sampler.set_epoch(epoch)
        indices: Any = iter(sampler)
        for _ in range(drawn):
            next(indices)
        saved, place = sampler.state_dict(), indices.state_dict()
        expected = list(indices)
        resumed = DistributedSampler(20_000, mesh(1, 2))
        resumed.load_state_dict(saved)
        continued: Any = iter(resumed)
        continued.load_state_dict(place)
        assert list(continued) == expected
        assert len(expected) == 10_000 - drawn
    with pytest.raises(ResumeError, match="epoch: expected 2, got 1\nload the state of the sampler first"):
        iter(sampler).load_state_dict(place)


def test_a_dataloader_with_workers_resumes_after_the_batch_that_was_acknowledged() -> None:
    """The index iterator is far ahead of what was delivered, and at its end before the second batch comes."""
    sampler = DistributedSampler(24, mesh(0, 2))
    loader: DataLoader[int] = DataLoader(range(24), 4, sampler=sampler, num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    delivered = []
    for batch in loader:
        delivered.append(batch.tolist())
        if len(delivered) == 2:
            state = sampler.state_dict()  # after the first: the second is not acknowledged yet
        sampler.advance(len(batch))
    resumed = DistributedSampler(24, mesh(0, 2))
    resumed.load_state_dict(state)
    assert batches(resumed, 4) == delivered[1:]
    assert repr(resumed) == "<DistributedSampler of 24, dp 0/2, drop, stride, epoch 0>"


def test_a_rank_without_a_sample_resumes_where_it_stood() -> None:
    sampler = DistributedSampler(1, mesh(0, 4))
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    given = iter(sampler)
    given.load_state_dict(state)  # as StatefulDataLoader does
    assert list(given) == []
    assert sampler.state_dict() == state
