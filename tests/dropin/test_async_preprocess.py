"""F1 to F7 are the faults that `systems.md` lists: lost and hidden errors, a hang, no bound, lost packing, no resume, ranks."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from aioloader import AlreadySharded, ConfigError, Loader, Mesh, Pack, PreprocessError, PretrainCollator, ResumeError, SourceError
from aioloader.dropin.async_config import resolve_async_config
from aioloader.dropin.async_preprocess import AsyncPreprocessIterableDataset
from aioloader.dropin.distributed_iterable import DistributedIterableDataset
from aioloader.dropin.handover import hand_over, take_over
from aioloader.sources.pull import PATIENCE_S
from aioloader.testing.leaks import resources, wait_until_clean
from tests.dropin import stream_cases as cases
from tests.dropin.stream_cases import INLINE, PROCESSES, THREADS, pretend_worker, records, rest_of, split_at, xs

LOCKSTEP_S = 10.0
RUNS = 100  # in all: of the function and of the dataset, with a fast consumer and a slow one


def consume(dataset: Any, given: list[int], delay_s: float = 0.0) -> None:
    """Add the numbers that a dataset gives to `given`, spending some time on each."""
    for sample in dataset:
        given += sample.values()
        time.sleep(delay_s)


# How many workers and records in flight


@pytest.mark.parametrize(
    ("buffer_size", "num_workers", "cpu", "expected"),
    [
        (None, None, 64, (8, 8)),
        (None, None, 4, (8, 4)),
        (None, None, None, (8, 1)),
        (None, 16, 4, (16, 16)),
        (64, None, 4, (64, 4)),
        (3, None, 4, (3, 3)),
        (16, 4, 1, (16, 4)),
        (None, 0, 4, (1, 0)),
        (5, 0, 4, (5, 0)),
    ],
)
def test_what_is_left_out_follows_the_rules_of_the_original(
    buffer_size: int | None, num_workers: int | None, cpu: int | None, expected: tuple[int, int]
) -> None:  # A014-A017
    assert resolve_async_config(buffer_size, num_workers, cpu=cpu) == expected


def test_fewer_records_than_workers_are_kept_with_one_warning() -> None:  # A017
    with pytest.warns(UserWarning, match="12 workers have nothing to do") as caught:
        assert resolve_async_config(4, 16) == (4, 16)
    assert len(caught) == 1


@pytest.mark.parametrize(("buffer_size", "num_workers"), [(0, None), (-1, 2), (None, -1), ("8", None), (8, True)])
def test_what_is_no_number_is_refused(buffer_size: Any, num_workers: Any) -> None:
    with pytest.raises(ConfigError, match="expected an int of at least"):
        resolve_async_config(buffer_size, num_workers)


def test_the_dataset_knows_its_numbers() -> None:  # A040
    dataset = AsyncPreprocessIterableDataset(records(3), cases.same)
    assert dataset.buffer_size == 8
    assert 1 <= dataset.num_workers <= 8


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"preprocess_fn": "tokenize"}, "preprocess_fn"),
        ({"dataset": 7}, "source"),
        ({"pool": "ray"}, "pool"),
        ({"host": "cloud"}, "host"),
        ({"seed": -1}, "seed"),
        ({"memory_limit": "much"}, "memory_limit"),
        ({"outer_batch_size": 0}, "outer_batch_size"),
        ({"on_error": "ignore"}, "on_error"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        AsyncPreprocessIterableDataset(**{"dataset": records(3), "preprocess_fn": cases.same, **changed})


# What comes out


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=["inline", "threads", "processes"])
def test_samples_come_in_the_order_of_the_records(options: dict[str, Any]) -> None:  # A001, A037, A057
    dataset = AsyncPreprocessIterableDataset(records(60), cases.first_slowest, 16, **options)
    assert xs(dataset) == list(range(60))
    assert xs(dataset) == list(range(60)), "a second pass is the same"
    dataset.close()


@pytest.mark.parametrize("buffer_size", [1, 8, 64])
def test_a_call_gets_one_record_whatever_the_buffer(buffer_size: int) -> None:  # A012, A019
    dataset = AsyncPreprocessIterableDataset(records(40), cases.numbered, buffer_size, **INLINE)
    assert list(dataset) == [{"x": index, "length": 1} for index in range(40)]


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=["inline", "threads"])
def test_a_record_gives_none_or_several_samples_which_stay_together(options: dict[str, Any]) -> None:  # A047, A048, A059
    dataset = AsyncPreprocessIterableDataset(records(20), cases.some_or_many, **options)
    assert xs(dataset)[:12] == [0, 1, 1.1, 1.2, 3, 4, 5, 6, 8, 8.1, 8.2, 9]
    assert dataset.stats()["records"]["filtered_records"] == 4


def test_columns_of_unequal_length_are_an_error_that_names_them_and_the_record() -> None:  # A049
    dataset = AsyncPreprocessIterableDataset(
        DistributedIterableDataset(records(9), Mesh(dp_rank=1, dp_size=2)), lambda batch: {"a": [1, 2], "b": [1, 2, 3]}, **INLINE
    )
    with pytest.raises(PreprocessError, match=r"sequence\[1\].*'a' has 2, 'b' has 3"):
        next(iter(dataset))


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=["inline", "threads", "processes"])
def test_values_of_all_kinds_come_as_they_are(options: dict[str, Any]) -> None:  # A004
    record: dict[str, Any] = {
        "text": "text",
        "bytes": b"\0\1",
        "list": [1, [2, "three"], None],
        "none": None,
        "small": np.arange(5, dtype=np.int16),
        "large": np.arange(30_000, dtype=np.float64).reshape(100, 300),
        "names": np.array(["a", "bc"]),
        "scalar": np.float32(0.5),
        "tensor": torch.arange(6).reshape(2, 3) if options is not PROCESSES else 0,  # importing torch in a worker takes seconds
    }
    dataset = AsyncPreprocessIterableDataset([record] * 9, cases.same, 16, **options)
    for sample in dataset:
        assert list(sample) == list(record)
        for name, value in record.items():
            assert type(sample[name]) is type(value), name
            if isinstance(value, np.ndarray):
                assert sample[name].dtype == value.dtype
            assert np.array_equal(sample[name], value) if hasattr(value, "shape") else sample[name] == value, name
    dataset.close()


def test_large_arrays_travel_apart_from_their_samples() -> None:
    tensor, array = torch.ones(20_000), np.ones((100, 100))
    fields = hand_over([{"a": array, "n": 1}, {"a": array.T.astype("U3"), "t": tensor}])
    assert {name for name in fields if name != "samples"} == {"0", "1"}
    again = take_over({**fields, "0": torch.from_numpy(array)})
    assert [list(sample) for sample in again] == [["a", "n"], ["a", "t"]]
    assert np.array_equal(again[0]["a"], array)
    assert again[1]["t"] is tensor


def test_each_record_of_a_rank_is_preprocessed_once(tmp_path: Path) -> None:  # A029, A033
    def noted(batch: dict[str, list[int]]) -> dict[str, list[int]]:
        with open(tmp_path / "calls", "a") as file:
            file.write(f"{batch['i'][0]}\n")
        return batch

    for rank in range(4):
        list(AsyncPreprocessIterableDataset(DistributedIterableDataset(records(100), Mesh(dp_rank=rank, dp_size=4)), noted, **THREADS))
        calls = (tmp_path / "calls").read_text().split()
        assert sorted(map(int, calls)) == list(range(rank, 100, 4))
        (tmp_path / "calls").unlink()


def test_random_delays_change_nothing() -> None:  # A006, A023, A055
    for rank in (0, 3):
        dealt = DistributedIterableDataset(records(120), Mesh(dp_rank=rank, dp_size=4))
        dataset = AsyncPreprocessIterableDataset(dealt, cases.at_random_times, **THREADS)
        assert [xs(dataset) for _ in range(3)] == [list(range(rank, 120, 4))] * 3


def test_a_dataset_that_cannot_move_is_read_where_it_is() -> None:  # A036
    class Unmovable(cases.Counting):
        def __reduce__(self) -> Any:
            raise TypeError("it stays here")

    dataset = AsyncPreprocessIterableDataset(Unmovable(20), cases.same, 8, 1)
    assert cases.ids(dataset) == list(range(20))
    dataset.close()
    with pytest.raises(ConfigError, match="use host='thread'"):
        next(iter(AsyncPreprocessIterableDataset(Unmovable(20), cases.same, 8, 1, host="process")))


# F1, F2, F3: errors


@pytest.mark.parametrize("delay_s", [0.0, 0.001], ids=["fast", "slow"])
def test_an_error_of_the_function_is_raised_in_its_place_in_every_run(delay_s: float) -> None:  # A067, F1
    dataset = AsyncPreprocessIterableDataset(records(30), cases.bad_at_15, 16, **THREADS)
    for _ in range(RUNS // 4):
        given: list[int] = []
        with pytest.raises(PreprocessError, match=r"sequence\[15\].*the fifteenth is corrupt") as caught:
            consume(dataset, given, delay_s)
        assert given == list(range(15))
        assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("delay_s", [0.0, 0.001], ids=["fast", "slow"])
def test_an_error_of_the_dataset_is_raised_in_its_place_in_every_run(delay_s: float) -> None:  # A066, F1
    dataset = AsyncPreprocessIterableDataset(cases.failing_after(20), cases.same, 8, **THREADS)
    for _ in range(RUNS // 4):
        given: list[int] = []
        with pytest.raises(SourceError, match="the disk is gone") as caught:
            consume(dataset, given, delay_s)
        assert given == list(range(20))
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=["inline", "threads"])
def test_an_error_is_raised_again_and_never_becomes_the_end(options: dict[str, Any]) -> None:  # A068, F2
    dataset = AsyncPreprocessIterableDataset(records(30), cases.bad_at_15, **options)
    iterator = iter(dataset)
    assert xs(itertools.islice(iterator, 15)) == list(range(15))
    for _ in range(3):
        with pytest.raises(PreprocessError, match="corrupt"):
            next(iterator)
    with pytest.raises(PreprocessError, match="corrupt"):  # as both back ends of the original wrap their loaders
        for _ in itertools.islice((sample for _ in itertools.count() for sample in dataset), 60):
            pass


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=["inline", "threads"])
def test_what_is_no_exception_hangs_nothing(options: dict[str, Any]) -> None:  # A069, F3
    dataset = AsyncPreprocessIterableDataset(records(30), cases.panics_at_3, 8, **options)
    given: list[int] = []
    started = time.monotonic()
    with pytest.raises(PreprocessError, match="Failure: panicked"):
        consume(dataset, given)
    assert given == [0, 1, 2]
    assert time.monotonic() - started < LOCKSTEP_S


# F4: bounds


@pytest.mark.parametrize("buffer_size", [1, 8, 64])
def test_no_more_records_are_read_than_the_buffer_holds_also_behind_a_slow_one(buffer_size: int) -> None:  # A011, A013, F4
    upstream = cases.Counting(400)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = AsyncPreprocessIterableDataset(lambda: iter(upstream), cases.head_of_line, buffer_size, **THREADS)
    ahead = [upstream.taken - number for number, _ in enumerate(dataset, start=1)]
    assert max(ahead) <= buffer_size
    assert max(ahead) >= buffer_size // 2, "the buffer is used"


@pytest.mark.parametrize("buffer_size", [2, 512])
def test_a_sample_is_not_held_back_for_others(buffer_size: int) -> None:
    given = threading.Semaphore(0)

    def lockstep() -> Iterator[dict[str, int]]:
        for index in range(20):
            time.sleep(1.2 * PATIENCE_S)  # of a stream that is as slow as this, records are read one at a time
            yield {"i": index}
            assert given.acquire(timeout=LOCKSTEP_S), f"record {index} was never given"

    for _ in AsyncPreprocessIterableDataset(lockstep, cases.same, buffer_size, **THREADS):
        given.release()


# F5: packing


def test_a_packer_behind_it_loses_no_token() -> None:  # F5
    lengths = [6, 11, 21, 41]
    dataset = AsyncPreprocessIterableDataset(
        [{"input_ids": list(range(length))} for length in lengths], lambda batch: {"input_ids": batch["input_ids"]}, **INLINE
    )
    with Loader(dataset, batch=Pack(16, rows=1), collate=PretrainCollator(), end="pad", workers=0, mesh=Mesh()) as loader:
        assert sum(batch.num_tokens for batch in loader) == sum(lengths)


# F6: resume


def test_a_state_gives_the_next_sample_from_every_place() -> None:  # F6
    whole = list(AsyncPreprocessIterableDataset(records(23), cases.some_or_many, **INLINE))
    for number in range(len(whole) + 1):
        first, state = split_at(AsyncPreprocessIterableDataset(records(23), cases.some_or_many, **INLINE), number)
        again = AsyncPreprocessIterableDataset(records(23), cases.some_or_many, 3, **INLINE)
        assert first + rest_of(again, state) == whole, number
        assert len(str(state)) < 4096


def test_a_state_within_a_group_of_samples_is_exact_with_other_workers() -> None:  # F6
    whole = list(range(3000))
    dataset = AsyncPreprocessIterableDataset(records(3000), cases.numbered, 512, **THREADS)
    iterator = iter(dataset)
    states = []
    for number in range(1, 2001):
        next(iterator)
        if number % 90 < 2:  # groups hold up to 64
            states.append((number, cases.through_json(dataset.state_dict())))
    other = AsyncPreprocessIterableDataset(records(3000), cases.numbered, 7, **INLINE)
    for number, state in states[::4]:
        other.load_state_dict(state)
        assert xs(itertools.islice(iter(other), 100)) == whole[number : number + 100]
    dataset.load_state_dict(states[-1][1])
    assert xs(dataset) == whole[states[-1][0] :], "the pass that ran has ended"


def test_a_state_after_an_error_comes_to_the_same_record() -> None:
    dataset = AsyncPreprocessIterableDataset(records(30), cases.bad_at_15, 16, **THREADS)
    with pytest.raises(PreprocessError, match="corrupt"):
        list(dataset)
    state = cases.through_json(dataset.state_dict())
    again = AsyncPreprocessIterableDataset(records(30), cases.bad_at_15, **INLINE)
    again.load_state_dict(state)
    with pytest.raises(PreprocessError, match=r"sequence\[15\]"):
        next(iter(again))


def test_a_loaded_state_holds_for_one_pass_of_its_epoch() -> None:
    dataset = AsyncPreprocessIterableDataset(records(10), cases.numbered, **INLINE)
    _, state = split_at(dataset, 4)
    dataset.load_state_dict(state)
    assert dataset.state_dict() == state
    assert xs(dataset) == list(range(4, 10))
    assert xs(dataset) == list(range(10))
    dataset.load_state_dict(state)
    dataset.set_epoch(0)
    assert xs(dataset) == list(range(4, 10)), "the same epoch keeps it"
    dataset.load_state_dict(state)
    dataset.set_epoch(1)
    assert xs(dataset) == list(range(10)), "another lets it go"
    assert dataset.state_dict()["epoch"] == 1
    assert xs(itertools.islice(dataset, 3)) + xs(dataset) == [0, 1, 2, *range(10)], "a pass that is left begins again"


def test_a_state_of_the_end_begins_the_epoch_again() -> None:
    dataset = AsyncPreprocessIterableDataset(records(5), cases.numbered, **INLINE)
    assert len(list(dataset)) == 5
    assert rest_of(dataset, cases.through_json(dataset.state_dict())) == list(dataset)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: {**state, "version": 2}, "version"),
        (lambda state: {**state, "more": 1}, "entries"),
        (lambda state: None, "entries"),
        (lambda state: {**state, "worker": [1, 2, 1]}, "DataLoader worker"),
    ],
)
def test_a_foreign_state_is_refused(change: Any, match: str) -> None:
    dataset = AsyncPreprocessIterableDataset(records(5), cases.numbered, **INLINE)
    with pytest.raises(ResumeError, match=match):
        dataset.load_state_dict(change(split_at(dataset, 2)[1]))


def test_a_state_of_another_rank_or_function_is_refused() -> None:
    def make(rank: int, function: Any) -> AsyncPreprocessIterableDataset:
        return AsyncPreprocessIterableDataset(DistributedIterableDataset(records(9), Mesh(dp_rank=rank, dp_size=2)), function, **INLINE)

    _, state = split_at(make(0, cases.numbered), 2)
    with pytest.raises(ResumeError, match="source"):
        make(1, cases.numbered).load_state_dict(state)
    with pytest.raises(ResumeError, match="preprocess"):
        make(0, cases.same).load_state_dict(state)


def test_the_epoch_is_passed_on_and_seeds_the_random_numbers() -> None:
    upstream = cases.Counting(4)
    dataset = AsyncPreprocessIterableDataset(upstream, cases.some_or_many, **INLINE)
    first = list(dataset)
    dataset.set_epoch(3)
    assert list(dataset) != first, "random numbers follow the epoch"
    dataset.set_epoch(0)
    assert list(dataset) == first
    assert upstream.epochs == [0, 3, 0]


# Closing


def test_a_loop_that_is_left_ends_what_it_started() -> None:  # A065
    dataset = AsyncPreprocessIterableDataset(records(10_000), cases.at_random_times, 16, **PROCESSES)
    before = resources()
    for sample in dataset:
        if sample["x"] == 3:
            break
    left = wait_until_clean(before, timeout_s=2.0)
    assert not left.count, left


def test_an_older_iterator_ends_and_says_so() -> None:
    dataset = AsyncPreprocessIterableDataset(records(9), cases.numbered, **INLINE)
    older = iter(dataset)
    next(older)
    assert len(list(dataset)) == 9
    with pytest.raises(Exception, match=r"expected an open iterator, got one that was closed"):
        next(older)


def test_it_travels_without_what_runs() -> None:
    dataset = AsyncPreprocessIterableDataset(records(9), cases.numbered, **INLINE)
    iterator = iter(dataset)
    next(iterator)
    assert len(list(pickle.loads(pickle.dumps(dataset)))) == 9


# The place in the chain


def test_an_undealt_dataset_in_a_job_of_several_ranks_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:  # A061
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="wrap it in DistributedIterableDataset"):
        AsyncPreprocessIterableDataset(records(4), cases.same, **INLINE)
    AsyncPreprocessIterableDataset(DistributedIterableDataset(records(4), Mesh()), cases.same, **INLINE)
    split = AsyncPreprocessIterableDataset(AlreadySharded(records(4)), cases.same, **INLINE)
    assert len(list(split)) == 4


def test_the_reversed_order_is_refused_unless_asked_for() -> None:  # A032
    preprocessed = AsyncPreprocessIterableDataset(records(10), cases.numbered, **INLINE)
    with pytest.raises(ConfigError, match="deal them to the ranks first, preprocess then"):
        DistributedIterableDataset(preprocessed, Mesh(dp_rank=1, dp_size=2))
    assert xs(DistributedIterableDataset(preprocessed, Mesh(dp_rank=1, dp_size=2), allow_postshard=True)) == [1, 3, 5, 7, 9]


# Inside a DataLoader


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_a_dataloader_around_it_keeps_the_order(num_workers: int, batch_size: int | None) -> None:  # K16
    dealt = DistributedIterableDataset(records(50), Mesh(dp_rank=1, dp_size=2))
    dataset = AsyncPreprocessIterableDataset(dealt, cases.numbered, outer_batch_size=batch_size or 1, **INLINE)
    batches = DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, collate_fn=cases.collate_for(batch_size))
    assert list(itertools.chain(*batches)) == list(range(1, 50, 2))


@pytest.mark.parametrize("options", [THREADS, {"num_workers": 1}], ids=["threads", "processes"])
def test_its_workers_run_inside_those_of_a_dataloader(options: dict[str, Any]) -> None:
    dataset = AsyncPreprocessIterableDataset(cases.Counting(40), cases.numbered, 8, outer_batch_size=4, **options)
    batches = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=cases.batched)
    assert list(itertools.chain(*batches)) == list(range(40))


def test_records_that_give_other_than_one_sample_cannot_keep_their_order_over_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = AsyncPreprocessIterableDataset(records(40), cases.some_or_many, outer_batch_size=1, **INLINE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        over_workers = xs(DataLoader(dataset, batch_size=None, num_workers=2))
    assert sorted(over_workers) == xs(dataset)
    pretend_worker(monkeypatch, 1, 2)
    with pytest.warns(UserWarning, match="expected one sample from each record in a DataLoader with 2 workers") as caught:
        list(dataset)
    assert len(caught) == 1


def test_the_epoch_reaches_persistent_workers() -> None:
    dataset = AsyncPreprocessIterableDataset(records(6), cases.some_or_many, outer_batch_size=1, **INLINE)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    first = list(loader)
    assert list(loader) == first
    dataset.set_epoch(1)
    assert list(loader) != first
