from __future__ import annotations

import gc
import itertools
import pickle
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from aioloader import AlreadySharded, ClosedError, ConfigError, Mesh, ResumeError, SourceError
from aioloader.dropin.async_preprocess import AsyncPreprocessIterableDataset
from aioloader.dropin.distributed_iterable import DistributedIterableDataset
from aioloader.dropin.outer_worker import OuterWorker, hidden_outer_worker, outer_worker
from tests.dropin import stream_cases as cases
from tests.dropin.hugging_face import datasets, streamed, write_json_lines
from tests.dropin.stream_cases import INLINE, THREADS, ids, pretend_worker, records, rest_of, split_at

FEW_CPUS = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def dealt(dataset: Any, rank: int = 0, size: int = 1, **options: Any) -> DistributedIterableDataset:
    return DistributedIterableDataset(dataset, Mesh(dp_rank=rank, dp_size=size), **options)


class OfWorkers(IterableDataset[dict[str, int]]):
    """A dataset that deals its records to DataLoader workers itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[dict[str, int]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return ({"i": index} for index in range(first, self.number, step))


class Stateful(IterableDataset[dict[str, int]]):
    """A dataset with a state of its own; counts what it reads."""

    def __init__(self, number: int) -> None:
        self.number, self.at, self.num_read = number, 0, 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.at < self.number:
            self.at += 1
            self.num_read += 1
            yield {"i": self.at - 1}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def make_list(number: int, _directory: Path) -> Any:
    return records(number)


def make_function(number: int, _directory: Path) -> Any:
    return lambda: iter(records(number))


def make_iterable(number: int, _directory: Path) -> Any:
    return cases.Counting(number)


def make_stateful(number: int, _directory: Path) -> Any:
    return Stateful(number)


def make_huggingface_dataset(number: int, _directory: Path) -> Any:
    return datasets.Dataset.from_dict({"i": list(range(number))})


def make_huggingface_stream(number: int, directory: Path) -> Any:
    half = number // 2
    parts = [records(number)[:half], records(number)[half:]]
    return streamed(*(write_json_lines(directory, part, f"{name}.jsonl") for name, part in enumerate(parts)))


KINDS = [make_list, make_function, make_iterable, make_stateful, make_huggingface_dataset, make_huggingface_stream]
every_kind = pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__.removeprefix("make_"))
Make = Callable[[int, Path], Any]


# Who gets what


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@every_kind
def test_a_rank_gets_every_nth_record(make: Make, size: int, tmp_path: Path) -> None:  # A054, A064
    for rank in {0, size // 2, size - 1}:
        assert ids(dealt(make(101, tmp_path), rank, size)) == list(range(rank, 101, size))


def test_the_union_over_the_ranks_is_the_data() -> None:  # A064
    for size in (1, 2, 3, 8):
        parts = [ids(dealt(records(1001), rank, size)) for rank in range(size)]
        assert sorted(itertools.chain(*parts)) == list(range(1001))


def test_ranks_of_one_coordinate_get_the_same_records() -> None:  # F7: world 8 = 4 dp x 2 tp; by global rank they would differ
    meshes = [Mesh(dp_rank=rank // 2, dp_size=4, tp_rank=rank % 2, tp_size=2) for rank in range(8)]
    parts = [ids(DistributedIterableDataset(records(20), mesh)) for mesh in meshes]
    assert parts == [list(range(coordinate, 20, 4)) for coordinate in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_one_shard_is_enough_for_all_ranks(tmp_path: Path) -> None:  # K15
    stream = streamed(write_json_lines(tmp_path, records(36)))
    assert [ids(dealt(stream, rank, 4)) for rank in range(4)] == [list(range(rank, 36, 4)) for rank in range(4)]


@pytest.mark.parametrize("mesh", [None, 0, (0, 2)])
def test_a_mesh_is_required(mesh: Any) -> None:
    with pytest.raises(ConfigError, match="expected a Mesh"):
        DistributedIterableDataset(records(4), mesh)
    with pytest.raises(TypeError, match="mesh"):
        DistributedIterableDataset(records(4))  # type: ignore[call-arg]


def test_an_async_iterable_is_sent_to_the_loader() -> None:
    async def stream() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(ConfigError, match=r"which is asynchronous; give it to aioloader\.Loader"):
        dealt(stream)


@pytest.mark.parametrize("dataset", [AlreadySharded(records(4)), dealt(records(4))], ids=["said", "seen"])
def test_a_dataset_is_dealt_once(dataset: Any) -> None:
    with pytest.raises(ConfigError, match="not dealt to the ranks yet"):
        dealt(dataset, 0, 2)


def test_an_indexed_dataset_is_read_where_it_is_one_s_own() -> None:
    class Watched(list[int]):
        read: list[int] = []  # noqa: RUF012 - shared with what the source makes of it

        def __getitem__(self, index: Any) -> Any:
            self.read.append(index)
            return super().__getitem__(index)

    assert list(dealt(Watched(range(20)), 1, 4)) == [1, 5, 9, 13, 17]
    assert Watched.read == [1, 5, 9, 13, 17]


# Lengths and ends


@pytest.mark.parametrize(("tail", "lengths"), [("keep", [33, 33, 32]), ("drop", [32, 32, 32])])
@pytest.mark.parametrize("make", [make_list, make_huggingface_dataset])
def test_the_tail_is_kept_or_dropped(make: Make, tail: str, lengths: list[int], tmp_path: Path) -> None:  # A064, K66
    parts = [dealt(make(98, tmp_path), rank, 3, tail=tail) for rank in range(3)]
    assert [len(part) for part in parts] == lengths
    assert [len(list(part)) for part in parts] == lengths
    assert set(itertools.chain(*map(ids, parts))) == set(range(sum(lengths)))


def test_an_iterable_that_knows_its_length_has_one() -> None:
    class Sized(cases.Counting):
        def __len__(self) -> int:
            return self.number

    part = dealt(Sized(10), 2, 4, tail="drop")
    assert len(part) == 2
    assert ids(part) == [2, 6]


def test_a_stream_has_no_length(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a dataset of known size, got a stream"):
        len(dealt(make_function(4, tmp_path)))
    with pytest.raises(ConfigError, match="'keep' for a stream"):
        dealt(make_function(4, tmp_path), tail="drop")


# State


@every_kind
def test_a_state_gives_the_next_record_from_every_place(make: Make, tmp_path: Path) -> None:
    whole = ids(dealt(make(29, tmp_path), 1, 2))
    for number in range(len(whole) + 1):
        first, state = split_at(dealt(make(29, tmp_path), 1, 2), number)
        assert ids(first) + ids(rest_of(dealt(make(29, tmp_path), 1, 2), state)) == whole, number


def test_the_state_of_the_dataset_is_used_where_it_has_one() -> None:
    first, state = split_at(dealt(Stateful(5000), 1, 2), 2000)
    dataset = Stateful(5000)
    assert ids(first) + ids(rest_of(dealt(dataset, 1, 2), state)) == list(range(1, 5000, 2))
    assert dataset.num_read == 1000


def test_a_state_of_a_left_pass_is_that_of_its_last_record() -> None:
    part = dealt(Stateful(5000))
    for row in part:
        if row["i"] == 1500:
            break
    state = part.state_dict()
    assert ids(rest_of(dealt(Stateful(5000)), state))[0] == 1501


def test_a_state_holds_for_one_pass_of_its_epoch() -> None:
    part = dealt(records(10))
    _, state = split_at(part, 4)
    part.load_state_dict(state)
    assert part.state_dict() == state
    assert ids(part) == list(range(4, 10))
    assert ids(part) == list(range(10))
    part.load_state_dict(state)
    part.set_epoch(1)
    assert ids(part) == list(range(10)), "another epoch lets it go"
    assert rest_of(part, part.state_dict()) == records(10), "a state of the end begins the epoch again"


def test_a_state_of_other_records_is_refused() -> None:
    _, state = split_at(dealt(records(10), 0, 2), 2)
    for other in (dealt(records(10), 1, 2), dealt(records(10), 0, 3), dealt(records(10), 0, 2, tail="drop"), dealt(records(11), 0, 2)):
        with pytest.raises(ResumeError, match="expected"):
            other.load_state_dict(state)
    with pytest.raises(ResumeError, match="entries"):
        dealt(records(10), 0, 2).load_state_dict({"at": 3})


def test_the_epoch_is_passed_on(tmp_path: Path) -> None:
    upstream = cases.Counting(4)
    part = dealt(upstream)
    part.set_epoch(7)
    list(part)
    list(part)
    assert upstream.epochs == [7, 7]
    shuffled = dealt(make_huggingface_stream(40, tmp_path).shuffle(seed=1, buffer_size=10))
    first = ids(shuffled)
    shuffled.set_epoch(1)
    assert sorted(ids(shuffled)) == sorted(first) == list(range(40))
    assert ids(shuffled) != first


@pytest.mark.parametrize(("first", "stop"), [(12, None), (0, 12)])
def test_a_part_of_a_stream_is_the_same_part_in_the_second_pass(first: int, stop: int | None, tmp_path: Path) -> None:  # K19
    stream = make_huggingface_stream(30, tmp_path)
    part = dealt(stream.skip(first) if stop is None else stream.take(stop))
    assert [ids(part) for _ in range(2)] == [list(range(30)[first:stop])] * 2


# Errors and closing


def test_a_failing_dataset_fails_in_its_place_and_every_time() -> None:
    iterator = iter(dealt(cases.failing_after(20), 1, 2))
    assert ids(itertools.islice(iterator, 10)) == list(range(1, 20, 2))
    for _ in range(2):
        with pytest.raises(SourceError, match=r"iterable\[20\].*the disk is gone"):
            next(iterator)


def test_a_loop_that_is_left_closes_the_dataset() -> None:
    closed = []

    def stream() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    part = dealt(stream)
    for _ in part:
        break
    gc.collect()
    assert closed == [True]
    iterator = iter(part)
    assert next(iterator) == 0
    iter(part)
    with pytest.raises(ClosedError, match="replaced by a newer one"):
        next(iterator)


def test_a_generator_is_read_once_and_says_so() -> None:
    part = dealt(index for index in range(3))
    assert list(part) == [0, 1, 2]
    with pytest.raises(ConfigError, match="a generator can be read once"):
        list(part)


def test_it_travels_without_its_pass() -> None:
    part = dealt(records(9), 1, 2)
    iterator = iter(part)
    next(iterator)
    assert ids(pickle.loads(pickle.dumps(part))) == [1, 3, 5, 7]


# DataLoader workers


@FEW_CPUS
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("batch_size", [None, 1, 4])
@every_kind
def test_a_dataloader_around_it_keeps_the_order(make: Make, num_workers: int, batch_size: int | None, tmp_path: Path) -> None:  # K16
    part = dealt(make(45, tmp_path), 1, 2, outer_batch_size=batch_size or 1)
    batches = DataLoader(part, batch_size=batch_size, num_workers=num_workers, collate_fn=cases.collate_for(batch_size))
    assert list(itertools.chain(*batches)) == list(range(1, 45, 2))


@pytest.mark.parametrize("options", [None, INLINE, THREADS], ids=["raw", "inline", "threads"])
def test_a_dataset_that_deals_to_workers_itself_is_not_dealt_twice(options: dict[str, Any] | None) -> None:
    dataset: Any = dealt(OfWorkers(40), 1, 2, outer_batch_size=1)
    if options is not None:
        dataset = AsyncPreprocessIterableDataset(dataset, cases.same, outer_batch_size=1, **options)
    assert ids(DataLoader(dataset, batch_size=None, num_workers=2)) == list(range(1, 40, 2))


@FEW_CPUS
def test_more_consumers_than_records_get_all_of_them() -> None:  # K17
    parts = [ids(DataLoader(dealt(records(10), rank, 2, outer_batch_size=1), batch_size=None, num_workers=4)) for rank in range(2)]
    assert parts == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


@FEW_CPUS
@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
def test_an_epoch_does_not_grow_with_the_workers(num_workers: int) -> None:  # K18
    part = dealt(records(160), outer_batch_size=8)
    batches = list(DataLoader(part, batch_size=8, num_workers=num_workers, collate_fn=cases.batched))
    assert batches == [list(range(first, first + 8)) for first in range(0, 160, 8)]


def test_an_unknown_batch_size_is_warned_of_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    part = dealt(records(30))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = list(itertools.chain(*DataLoader(part, batch_size=4, num_workers=2, collate_fn=cases.batched)))
    assert given != sorted(given)
    assert sorted(given) == list(range(30))
    pretend_worker(monkeypatch, 0, 2)
    with pytest.warns(UserWarning, match="Pass outer_batch_size=batch_size"):
        assert ids(part) == list(range(0, 30, 2))
    pretend_worker(monkeypatch, 1, 2)
    assert ids(part) == list(range(1, 30, 2)), "the first worker says it for all"
    assert ids(dealt(records(30), outer_batch_size=4))[:6] == [4, 5, 6, 7, 12, 13]


def test_the_epoch_reaches_persistent_workers() -> None:
    class Epochs(cases.Counting):
        def __iter__(self) -> Iterator[dict[str, int]]:
            return iter([{"i": self.epochs[-1]}])

    part = dealt(Epochs(1), outer_batch_size=1)
    loader = DataLoader(part, batch_size=None, num_workers=1, persistent_workers=True)
    given = []
    for epoch in (0, 5, 2):
        part.set_epoch(epoch)
        given += ids(loader)
    assert given == [0, 5, 2]


@pytest.mark.filterwarnings("ignore:Neither dataset nor iter", "ignore:'set_vital' is deprecated")  # both are what torchdata does
@FEW_CPUS
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("is_preprocessed", [False, True], ids=["raw", "preprocessed"])
def test_a_stateful_dataloader_resumes_at_every_batch(num_workers: int, is_preprocessed: bool) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        part: Any = dealt(Stateful(53), 1, 2, outer_batch_size=4)
        if is_preprocessed:
            part = AsyncPreprocessIterableDataset(part, cases.same, outer_batch_size=4, **INLINE)
        return stateful.StatefulDataLoader(part, batch_size=4, num_workers=num_workers, collate_fn=cases.batched)

    whole = list(make())
    assert list(itertools.chain(*whole)) == list(range(1, 53, 2))
    for number in range(len(whole)):
        loader = make()
        first = list(itertools.islice(loader, number))
        state = cases.through_json(loader.state_dict())
        again = make()
        again.load_state_dict(state)
        assert first + list(again) == whole, number
        assert list(again) == whole, "and the next epoch is whole"


# Hiding the worker


def test_the_worker_is_hidden_from_what_is_beneath(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outer_worker() == OuterWorker()
    pretend_worker(monkeypatch, 1, 3)
    facts = get_worker_info()
    assert outer_worker() == OuterWorker(1, 3, is_worker=True)
    with hidden_outer_worker():
        assert get_worker_info() is None
        assert outer_worker() == OuterWorker()
        with hidden_outer_worker():
            assert get_worker_info() is None
        assert get_worker_info() is None
    assert get_worker_info() is facts


def test_a_torch_that_keeps_its_note_elsewhere_is_not_read_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data.get_worker_info", lambda: object())
    with pytest.raises(ConfigError, match="use num_workers=0 there"), hidden_outer_worker():
        pass
