"""`DistributedDataLoader`: the same batches inline and in workers, on any layout, after any resume; samplers of others; torch's options."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data import DistributedSampler as TorchSampler

from aioloader import AlreadySharded, ConfigError, Loader, Mesh, ResumeError, Shuffle
from aioloader.batching import FixedBatch
from aioloader.dropin.distributed_loader import DistributedDataLoader
from aioloader.dropin.foreign_sampler import ForeignSampler
from aioloader.dropin.sampler import DistributedSampler
from aioloader.state import merge
from tests.dropin import index_cases as cases
from tests.dropin.index_cases import Numbers, stack
from tests.naming import stable_repr
from tests.training.ranks import run_ranks

SIZE = 103


def mesh(dp_rank: int = 0, dp_size: int = 1) -> Mesh:
    return Mesh(dp_rank=dp_rank, dp_size=dp_size)


def make(dataset: Any = None, where: Mesh | None = None, size: int | None = 4, **options: Any) -> DistributedDataLoader:
    data = Numbers(SIZE) if dataset is None else dataset
    return DistributedDataLoader(data, where or Mesh(), size, **{"collator": stack} | options)


def ids(batches: Iterable[Any]) -> list[list[int]]:
    return [[] if batch.is_filler else batch["i"].tolist() for batch in batches]


def flat(parts: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def ranks(dp_size: int, **options: Any) -> list[list[list[int]]]:
    return [ids(make(where=mesh(rank, dp_size), **options)) for rank in range(dp_size)]


# Who gets what


@pytest.mark.parametrize("tail", ["drop", "pad", "keep"])
def test_ranks_get_what_the_sampler_deals_out(tail: str) -> None:
    """C037, C045, C046: the same indices, in the same order, as a plain DataLoader with the sampler would."""
    for rank, batches in enumerate(ranks(4, tail=tail, drop_last=False)):
        sampled = list(DistributedSampler(SIZE, mesh(rank, 4), tail=tail))
        assert flat(batches) == sampled
        assert [len(batch) for batch in batches] == [4] * (len(sampled) // 4) + [len(sampled) % 4] * (len(sampled) % 4 > 0)


def test_the_order_is_that_of_a_loader_with_a_full_shuffle() -> None:
    shuffle = Shuffle(shards_in_window=None)
    whole = Loader(Numbers(SIZE), batch=FixedBatch(4), collate=stack, shuffle=shuffle, seed=7, workers=0, mesh=Mesh())
    assert ids(make(seed=7)) == [batch["i"].tolist() for batch in whole]


@pytest.mark.parametrize("options", [{"order": "torch"}, {"mode": "block"}, {"tail": "pad", "order": "torch"}, {"tail": "keep"}])
def test_a_sampler_of_ones_own_decides_order_mode_and_tail(options: dict[str, Any]) -> None:
    for rank in range(4):
        sampler = DistributedSampler(SIZE, mesh(rank, 4), seed=3, **options)
        loader = make(where=mesh(rank, 4), sampler=sampler, drop_last=False)
        for _ in range(2):
            assert flat(ids(loader)) == list(sampler)
        sampler.set_epoch(5)
        late = make(where=mesh(rank, 4), sampler=sampler, drop_last=False)
        assert late.epoch == 5
        assert flat(ids(late)) == list(sampler)


def test_peers_on_other_axes_get_identical_batches() -> None:
    """C038."""
    layouts = [
        Mesh(dp_rank=1, dp_size=2, tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2, cp_rank=tp, cp_size=2) for tp in (0, 1) for pp in (0, 1)
    ]
    delivered = [ids(make(where=where)) for where in layouts]
    assert delivered[0] == delivered[1] == delivered[2] == delivered[3] == ids(make(where=mesh(1, 2)))


def test_records_are_named_by_their_index() -> None:
    for batch in chain(make(), make(tail="pad", where=mesh(1, 4))):
        assert [sample.row for sample in batch.samples] == batch["i"].tolist()


def test_every_rank_takes_equally_many_steps() -> None:
    """K66, K67: 98 ids, 3 ranks, batches of 11."""
    data = Numbers(98)
    dropped = ranks(3, dataset=data, size=11)
    assert [len(one) for one in dropped] == [2, 2, 2]
    kept = ranks(3, dataset=data, size=11, tail="keep")
    assert [len(one) for one in kept] == [3, 3, 3]
    assert sorted(flat(chain.from_iterable(kept))) == list(range(98))
    evaluated, trained = ranks(4, tail="keep"), [make(where=mesh(rank, 4), size=1) for rank in range(4)]
    assert sorted(flat(chain.from_iterable(evaluated))) == list(range(103))
    assert len(flat(chain.from_iterable(ids(one) for one in trained))) == 100
    assert sum(one.stats()["records"]["dropped_records"] for one in trained) == 3


def barrier_per_step(rank: int, _store: Any) -> Any:
    delivered: list[list[list[int]]] = []
    for tail in ("drop", "keep"):
        loader = make(Numbers(98), mesh(rank, 3), 11, tail=tail)
        delivered.append([])
        for batch in loader:
            dist.barrier()
            delivered[-1].append(ids([batch])[0])
        assert len(delivered[-1]) == len(loader)
        loader.close()
    return delivered


@pytest.mark.timeout(60)
def test_real_ranks_take_equally_many_steps() -> None:
    """K66, with the barrier."""
    delivered = run_ranks(3, barrier_per_step)
    dropped, kept = ([one[which] for one in delivered] for which in (0, 1))
    assert [len(one) for one in dropped] == [2, 2, 2]
    assert [len(one) for one in kept] == [3, 3, 3]
    assert sorted(flat(chain.from_iterable(kept))) == list(range(98))


def test_evaluation_over_uneven_ranks_counts_each_sample_once() -> None:
    """K65: 10 ids on 3 ranks, of which 0 and 1 are right; fillers keep the ranks in step and count nothing."""
    delivered = ranks(3, dataset=Numbers(10), size=1, tail="keep", shuffle=False)
    assert [len(one) for one in delivered] == [4, 3, 3]
    counted = flat(chain.from_iterable(delivered))
    assert sum(one in (0, 1) for one in counted) / len(counted) == 0.2


def test_a_step_of_several_micro_batches_is_whole() -> None:
    """K21: 19 ids, a step is 4 micro-batches of 2."""
    dropped = list(make(Numbers(19), size=2, lanes=4))
    assert [batch.step for batch in dropped] == [0] * 4 + [1] * 4
    kept = list(make(Numbers(19), size=2, lanes=4, tail="keep"))
    assert [batch.step for batch in kept] == [0] * 4 + [1] * 4 + [2] * 4
    assert [len(batch.samples) for batch in kept[8:]] == [1, 1, 1, 0]
    assert [batch.is_filler for batch in kept[8:]] == [False, False, False, True]
    assert sorted(flat(ids(kept))) == list(range(19))


def test_a_slow_rank_keeps_its_records_when_a_fast_one_is_done() -> None:
    """K68."""
    slow, fast = (iter(make(Numbers(80), mesh(rank, 2))) for rank in range(2))
    taken = [next(slow)["i"].tolist() for _ in range(3)]
    others = flat(ids(fast))
    own = flat(taken + ids(slow))
    assert len(own) == len(others) == 40
    assert sorted(own + others) == list(range(80))


@pytest.mark.parametrize("dp_size", [1, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drop_last": False},
        {"tail": "pad"},
        {"tail": "pad", "drop_last": True},
        {"tail": "keep"},
        {"size": None, "batch_sampler": cases.Lists(SIZE)},
    ],
    ids=stable_repr,
)
def test_the_length_is_the_number_of_micro_batches(dp_size: int, options: dict[str, Any]) -> None:
    for rank in range(dp_size):
        loader = make(where=mesh(rank, dp_size), **options)
        assert len(loader) == len(list(loader))
        assert bool(loader)


def test_a_length_that_depends_on_the_data_is_an_error() -> None:
    for loader in (make(preprocess=cases.odd_twice), make(epochs=None), make(sampler=NoLength())):
        with pytest.raises(TypeError, match="a sampler with a length, no preprocess function and a number of epochs"):
            len(loader)


class ByContent:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return iter(sorted(range(len(self.dataset)), key=lambda index: self.dataset[index]["i"]))


class NoLength:
    def __iter__(self) -> Any:
        return iter(range(10))


# Epochs and state


def test_an_epoch_that_nobody_sets_advances_by_itself() -> None:
    """D004, C047: `epochs=1` ends with the data, and the next loop is another epoch."""
    loader = make()
    first, second = ids(loader), ids(loader)
    assert loader.epoch == 2
    assert first != second
    loader.set_epoch(0)
    assert ids(loader) == first
    assert ids(make(epochs=2)) == first + second


def test_set_epoch_is_passed_on_once() -> None:
    """C012."""
    sampler = cases.Shuffled(20)
    loader = make(Numbers(20), sampler=sampler)
    loader.set_epoch(3)
    assert sampler.told == [3]


SOURCES: dict[str, dict[str, Any]] = {
    "drop": {},
    "pad": {"tail": "pad"},
    "keep": {"tail": "keep"},
    "lanes": {"lanes": 4},
    "torch order": {"sampler": DistributedSampler(SIZE, mesh(1, 2), order="torch")},
    "sampler": {"sampler": cases.Shuffled(SIZE)},
    "stateful sampler": {"sampler": cases.WithState(SIZE)},
    "random sampler": {"sampler": RandomSampler(range(SIZE))},
    "split sampler": {"sampler": TorchSampler(range(SIZE), num_replicas=2, rank=1)},  # type: ignore[arg-type]
    "lists": {"batch_sampler": cases.Lists(SIZE), "size": None},
    "preprocess": {"preprocess": cases.odd_twice},
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_state_goes_on_with_the_next_batch(name: str) -> None:
    """C020, F8: as of the delivered batch, or of any batch held, in every epoch; `set_epoch` of a restored epoch keeps the place."""
    options = SOURCES[name]
    batches = list(make(where=mesh(1, 2), epochs=2, **options))
    whole = ids(batches)
    assert len(whole) > 20
    loader = make(where=mesh(1, 2), epochs=2, **options)
    iterator = iter(loader)
    for done in range(1, len(whole), 5):
        while iterator.num_batches < done:
            next(iterator)
        state = loader.state_dict()
        assert state["lanes"] == batches[done - 1].state()["lanes"] == loader.state_dict(after=batches[done - 1])["lanes"]
        resumed = make(where=mesh(1, 2), epochs=2, **options)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        resumed.set_epoch(resumed.epoch)
        assert ids(resumed) == whole[done:]


@pytest.mark.parametrize("options", [{}, {"tail": "keep"}], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_what_is_left_goes_to_another_number_of_ranks_exactly_once(options: dict[str, Any], steps: int) -> None:
    """C049: 4 -> 8, 4 -> 2."""
    seen: list[int] = []
    states = []
    for rank in range(4):
        loader = make(where=mesh(rank, 4), **options)
        iterator = iter(loader)
        seen += flat(ids(next(iterator) for _ in range(steps)))
        states.append(loader.state_dict())
        iterator.close()
    for dp_size in (8, 2):
        left: list[int] = []
        for rank in range(dp_size):
            loader = make(where=mesh(rank, dp_size), **options)
            loader.load_state_dict(merge(states))
            left += flat(ids(loader))
        delivered = seen + left
        assert len(set(delivered)) == len(delivered)
        assert len(delivered) > SIZE - (0 if options else dp_size * 4) - 1


def test_lanes_make_a_padded_run_elastic_and_without_them_it_is_refused() -> None:
    states = []
    for rank in range(4):
        loader = make(where=mesh(rank, 4), tail="pad")
        next(iter(loader))
        states.append(loader.state_dict())
    with pytest.raises(ResumeError, match=r"num_lanes: expected 2 .this loader., got 4"):
        make(where=mesh(0, 2), tail="pad").load_state_dict(merge(states))
    whole = [ids(make(where=mesh(rank, 4), tail="pad")) for rank in range(4)]
    fewer = make(where=mesh(0, 2), tail="pad", lanes=4)
    fewer.load_state_dict(merge(states))
    assert ids(fewer) == flat(zip(whole[0][1:], whole[2][1:], strict=True))  # type: ignore[arg-type]


def test_another_configuration_is_refused() -> None:
    state = make().state_dict()
    for other in (
        make(seed=1),
        make(shuffle=False),
        make(tail="pad"),
        make(size=8),
        make(Numbers(SIZE + 1)),
        make(preprocess=cases.odd_twice),
    ):
        with pytest.raises(ResumeError, match="the state does not belong to this loader"):
            other.load_state_dict(state)


# Samplers of others


def test_a_sampler_gives_the_order_of_all_ranks_and_is_dealt_out() -> None:
    order = list(cases.Shuffled(SIZE))
    for rank, batches in enumerate(ranks(4, sampler=cases.Shuffled(SIZE), tail="keep")):
        assert flat(batches) == order[rank::4]
    own = ids(make(where=mesh(1, 4), sampler=AlreadySharded(SequentialSampler(range(8)))))
    assert own == [[0, 1, 2, 3], [4, 5, 6, 7]], "or says that it is this rank's already"


def test_lists_of_a_batch_sampler_are_micro_batches() -> None:
    lists = list(cases.Lists(SIZE))
    for rank, batches in enumerate(ranks(2, size=None, batch_sampler=cases.Lists(SIZE))):
        assert batches == lists[rank::2][: len(lists) // 2]
    batched: Any = BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)
    assert ids(make(Numbers(10), size=None, batch_sampler=batched)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    filtered = ids(make(Numbers(10), size=None, batch_sampler=batched, preprocess=cases.odd_twice))
    assert filtered == [[1, 1, 2], [4, 5, 5, 7, 7], [8]]


def test_lists_are_fetched_at_once_where_the_dataset_can() -> None:
    batches = list(make(cases.InLists(10), size=None, batch_sampler=[[3, 1], [4, 4, 2]]))
    assert ids(batches) == [[3, 1], [4, 4, 2]]
    assert [batch["together"].tolist() for batch in batches] == [[2, 2], [3, 3, 3]]


def test_a_sampler_that_draws_from_torchs_generator_draws_the_same_on_every_rank_and_after_every_resume() -> None:
    weighted: Any = WeightedRandomSampler([1.0] * 50 + [0.0] * 53, SIZE)
    loader = make(sampler=weighted)
    first, second = ids(loader), ids(loader)
    assert first != second
    assert max(flat(first)) < 50
    resumed = make(sampler=WeightedRandomSampler([1.0] * 50 + [0.0] * 53, SIZE))
    resumed.set_epoch(1)
    torch.manual_seed(3)
    assert ids(resumed) == second
    seeded = ids(make(sampler=RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(8))))
    assert seeded == ids(make(sampler=RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(8)), seed=1))
    assert seeded != ids(make(sampler=RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(9))))


def test_a_sampler_moves_without_the_dataset_that_it_holds() -> None:
    dataset = Numbers(1000)
    dataset.ballast = bytes(10**6)  # type: ignore[attr-defined]
    moved = pickle.dumps(ForeignSampler(BatchSampler(TorchSampler(dataset, num_replicas=2, rank=1), 3, True), dataset, 0))  # type: ignore[arg-type]
    assert len(moved) < 10_000
    assert list(pickle.loads(moved)) == list(BatchSampler(TorchSampler(dataset, num_replicas=2, rank=1), 3, True))  # type: ignore[arg-type]


def test_a_sampler_that_cannot_do_without_the_dataset_or_cannot_move_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a sampler that needs only the length of the dataset.*got one that reads item 0 of it"):
        list(make(data := Numbers(9), sampler=ByContent(data), size=1))
    with pytest.raises(ConfigError, match=r"a sampler that can move to the engine, got a generator.*not an iterator"):
        make(sampler=(index for index in range(9)))


def test_a_sampler_by_global_rank_is_refused_where_that_is_wrong() -> None:
    """D002: rank 2 of 4 is dp rank 1 of 2 here."""
    where = Mesh(dp_rank=1, dp_size=2, tp_rank=0, tp_size=2)
    by_global_rank: Any = TorchSampler(range(SIZE), num_replicas=4, rank=2)  # type: ignore[arg-type]
    expected = r"num_replicas=2, rank=1: the data-parallel coordinate .*got a DistributedSampler with num_replicas=4, rank=2.*mesh.dp_rank"
    with pytest.raises(ConfigError, match=expected):
        make(where=where, sampler=by_global_rank)
    with pytest.raises(ConfigError, match=expected):
        make(where=where, size=None, batch_sampler=BatchSampler(by_global_rank, 4, drop_last=True))
    by_coordinate: Any = TorchSampler(range(SIZE), num_replicas=2, rank=1, drop_last=True)  # type: ignore[arg-type]
    assert flat(ids(make(where=where, sampler=by_coordinate, drop_last=False))) == list(by_coordinate)


# The rest of the surface


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": NoLength()}, r"dataset=\): expected a map-style dataset, with __len__ and __getitem__, got a NoLength"),
        ({"dataset": make().loader.as_iterable_dataset()}, "got a LoaderDataset; use Loader"),
        ({"where": 3}, r"mesh=\): expected a Mesh, got 3"),
        ({"size": None}, r"micro_batch_size=\): expected a size, or a batch_sampler"),
        ({"size": 0}, r"micro_batch_size=\): expected an int of at least 1, got 0"),
        ({"num_workers": -1}, r"num_workers=\): expected an int of at least 0, got -1"),
        ({"prefetch_factor": 0}, r"prefetch_factor=\): expected an int of at least 1, got 0"),
        ({"tail": "repeat"}, r"tail=\): expected one of 'drop', 'pad', 'keep', got 'repeat'"),
        ({"tail": "keep", "drop_last": True}, r"drop_last=\): expected False with tail='keep'"),
        ({"sampler": [1], "shuffle": True}, r"shuffle=\): expected None with a sampler"),
        ({"sampler": [1], "tail": "pad"}, r"tail=\): expected 'drop' or 'keep' with a sampler of your own, got 'pad'"),
        ({"sampler": 5}, r"sampler=\): expected an iterable that can be read again, got 5"),
        ({"batch_sampler": [[1]]}, r"micro_batch_size=\): expected None with a batch_sampler.*got 4"),
        ({"batch_sampler": [[1]], "size": None, "drop_last": True}, r"drop_last=\): expected None with a batch_sampler"),
        ({"sampler": DistributedSampler(SIZE, mesh(0, 2))}, "a sampler of dp rank 0 of 1, got one of dp rank 0 of 2"),
        ({"sampler": DistributedSampler(7, mesh())}, "a sampler of 103 records, got one of 7"),
        ({"sampler": DistributedSampler(SIZE, mesh()), "tail": "keep"}, r"tail=\): expected the sampler's, 'drop', got 'keep'"),
        ({"sampler": DistributedSampler(SIZE, mesh(), mode="block"), "lanes": 2}, r"lanes=\): expected 1 with mode='block', got 2"),
        ({"lanes": 3, "where": mesh(0, 2)}, r"lanes=\): expected a positive multiple of dp_size"),
    ],
    ids=stable_repr,
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**arguments)


def test_a_sampler_inside_an_epoch_is_refused() -> None:
    sampler = DistributedSampler(SIZE, mesh())
    sampler.advance(8)
    with pytest.raises(
        ConfigError, match=r"expected a sampler at the beginning of an epoch, got .*'offset': 8.*load the state of the loader"
    ):
        make(sampler=sampler)


def test_there_is_no_default_collator_and_no_default_mesh() -> None:
    """C052."""
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'collator'"):
        DistributedDataLoader(Numbers(9), Mesh(), 4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'mesh'"):
        DistributedDataLoader(Numbers(9), collator=stack)  # type: ignore[call-arg]


def test_items_that_are_none_or_lists_are_samples() -> None:
    batches = [batch["samples"] for batch in make(cases.Odd(4), collator=cases.as_objects, shuffle=False)]
    assert batches == [[[0, 0], None, [2, 2], None]]


async def test_async_for_gives_the_same_batches() -> None:
    """C053."""
    async with make() as loader:
        assert [batch["i"].tolist() async for batch in loader] == ids(make())


def test_pin_memory_without_cuda_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """D017, C019."""
    if torch.cuda.is_available():
        batch = next(iter(make(pin_memory=True, num_workers=1)))
        assert batch["i"].is_pinned()
        return
    with pytest.warns(UserWarning, match="expected a CUDA device, got none; batches stay in pageable memory") as caught:
        loader = make(pin_memory=True)
    assert len(caught) == 1
    assert ids(loader) == ids(make())


# Workers


@pytest.fixture(scope="module")
def inline() -> list[list[list[int]]]:
    loader = make(cases.Noisy(SIZE), epochs=1)
    return [ids(loader) for _ in range(3)]


def test_workers_give_what_an_inline_run_gives_and_stay_alive(inline: Any) -> None:
    """C017, D003, D016, D018, K14, K18: the same batches in the same number, the same processes in every epoch."""
    with make(cases.Noisy(SIZE), num_workers=2, persistent_workers=True) as loader:
        pids = []
        for epoch in (0, 1, 2, 0):
            loader.set_epoch(epoch)
            batches = list(loader)
            assert ids(batches) == inline[epoch]
            pids.append(loader.stats()["worker_pids"])
        noise = [batch["noise"].tolist() for batch in batches]
    assert len(pids[0]) == 2
    assert pids.count(pids[0]) == 4
    assert noise == [batch["noise"].tolist() for batch in make(cases.Noisy(SIZE))], "random numbers belong to the record"


def test_a_stalled_consumer_is_not_run_away_from(tmp_path: Path) -> None:
    """C043, C044, D019: 2 x 2 micro-batches ahead of the one delivered, and not one item more; workers change copies of the dataset."""
    log = tmp_path / "log"
    dataset = cases.Logged(400, str(log))
    with make(dataset, num_workers=2, prefetch_factor=2) as loader:
        iterator = iter(loader)
        first = next(iterator)
        deadline = time.monotonic() + 15
        while loader.stats()["waiting_batches"] < 4:
            assert time.monotonic() < deadline
        assert log.stat().st_size == (1 + 4) * 4
        assert len(first["i"]) == 4
        rest = flat(ids(iterator))
    assert sorted([*first["i"].tolist(), *rest]) == list(range(400))
    assert dataset.num_fetched == 0


def test_a_dataset_with_epochs_is_told_of_them_in_its_workers() -> None:
    """K14, for the dataset."""
    dataset = cases.WithEpoch(24)
    with make(dataset, num_workers=1, sampler=cases.Shuffled(24)) as loader:
        for epoch in (0, 1, 4):
            loader.set_epoch(epoch)
            batches = list(loader)
            assert {value for batch in batches for value in batch["epoch"].tolist()} == {epoch}
            assert ids(batches) == ids(make(Numbers(24), sampler=at_epoch(epoch, 24)))
    assert dataset.epoch == -1
    lists = list(make(cases.WithEpoch(9), size=None, batch_sampler=[[1, 2], [3]], epochs=2))
    assert [batch["epoch"].tolist() for batch in lists] == [[0, 0], [0], [1, 1], [1]]


def at_epoch(epoch: int, size: int) -> list[int]:
    sampler = cases.Shuffled(size)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_a_preview_of_an_order_is_what_comes_and_changes_nothing() -> None:
    dataset = Numbers(100)
    dealt: Any = TorchSampler(dataset, num_replicas=2, rank=1)  # type: ignore[arg-type]
    samplers: list[Any] = [RandomSampler(dataset), SequentialSampler(dataset), dealt]
    for one in samplers:
        sampler = ForeignSampler(one, dataset, 5)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        previews = [sampler.preview_order(epoch) for epoch in (0, 1, 0)]
        assert torch.equal(torch.get_rng_state(), before)
        assert previews[0] == previews[2]
        for epoch, preview in enumerate(previews[:2]):
            sampler.set_epoch(epoch)
            assert json.dumps(list(sampler)).startswith(str(preview["starts"])[:30])


def test_orders_that_are_too_long_or_fail_have_no_preview() -> None:
    assert ForeignSampler(range(20_000_000), Numbers(3), 0).preview_order(0) is None
    assert ForeignSampler(Failing(), Numbers(3), 0).preview_order(0) is None


class Failing:
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("no order")
