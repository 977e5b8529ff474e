"""Faults that people reported of comparable loaders, as tests: resume, other numbers of ranks, shuffling, who gets which record.

A number like K11 is the fault that a test rules out; `test_contract_coverage.py` lists them all, with those that other tests show.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioloader import ConfigError, FixedBatch, JsonLines, Loader, Mesh, Pack, PreprocessError, PretrainCollator, ResumeError, Shuffle
from aioloader.state import merge
from tests.contract.cases import INLINE, PROCESSES, THREADS, Options, all_facts, collate, documents, drain, name_of, numbers, some_or_many

SHUFFLE = Shuffle(window=16, seed=5)
THREE_RANKS = [Mesh(dp_rank=rank, dp_size=3) for rank in range(3)]


def make(source: Any, batch_size: int = 1, **options: Any) -> Loader:
    return Loader(source, batch=FixedBatch(batch_size), collate=collate, **{**INLINE, **options})


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def rows(batches: Any) -> list[int]:
    return [sample.row for batch in batches for sample in batch.samples]


def in_steps(ranks: list[list[Any]]) -> list[Any]:
    """Return the micro-batches of all ranks in the order of the run: step by step, lane by lane."""
    return sorted(itertools.chain(*ranks), key=lambda batch: (batch.step, batch.lane))


# Resume


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_after_three_shuffled_epochs_is_kept_and_the_fourth_follows(num_workers: int) -> None:
    """K02: nothing is lost or played again after whole epochs."""
    settings: dict[str, Any] = {"batch_size": 2, "shuffle": SHUFFLE, "workers": num_workers}
    with make(range(72), **settings) as loader:
        passes = [numbers(loader) for _ in range(3)]
        state = through_json(loader.state_dict())
        passes += [numbers(loader) for _ in range(2)]
    with make(range(72), **settings) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert [numbers(loader) for _ in range(2)] == passes[3:]
    assert all(sorted(one) == list(range(72)) for one in passes)
    assert len(set(map(tuple, passes))) == 5


def test_a_file_resumes_inside_what_its_reader_reads_at_once(tmp_path: Path) -> None:
    """K04: at the next record, and not where the next block of the file begins. (Streams of others: tests/adapters.)"""
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(3000)))

    def open_again() -> Loader:
        return make(JsonLines(path), 10, preprocess=lambda row: row["id"])

    with open_again() as loader:
        iterator = iter(loader)
        first = numbers(itertools.islice(iterator, 13))
        state = through_json(iterator.state())
        iterator.close()
    with open_again() as loader:
        loader.load_state_dict(state)
        rest = numbers(loader)
    assert rest[:3] == [130, 131, 132]
    assert first + rest == list(range(3000))


def test_a_shuffled_run_resumes_in_the_order_of_its_epoch() -> None:
    """K08: in the third epoch, and not in the order of the first."""
    with make(range(12), 3, shuffle=SHUFFLE) as loader:
        passes = [list(loader) for _ in range(3)]
    with make(range(12), 3, shuffle=SHUFFLE) as loader:
        loader.load_state_dict(through_json(passes[2][1].state()))
        rest = list(loader)
    assert all_facts(rest) == all_facts(passes[2][2:])
    assert numbers(rest) != numbers(passes[0][2:])


# Other numbers of ranks


def left_over(dp_size: int, lanes: int, state: Any) -> list[int]:
    """Return what all ranks of a run deliver once they loaded a state, in the order of the run."""
    ranks = []
    for rank in range(dp_size):
        with make(range(20), shuffle=SHUFFLE, lanes=lanes, mesh=Mesh(dp_rank=rank, dp_size=dp_size)) as loader:
            loader.load_state_dict(through_json(state))
            ranks.append(list(loader))
    return numbers(in_steps(ranks))


@pytest.mark.parametrize("saved_by", [1, 2])
def test_what_is_left_is_the_tail_of_the_permutation_on_any_number_of_ranks(saved_by: int) -> None:
    """K11: after 8 of 20 records of the fourth epoch; nothing is shuffled again."""
    with make(range(20), shuffle=SHUFFLE, lanes=2) as loader:
        loader.set_epoch(3)
        order = numbers(loader)
    states = []
    for rank in range(saved_by):
        with make(range(20), shuffle=SHUFFLE, lanes=2, mesh=Mesh(dp_rank=rank, dp_size=saved_by)) as loader:
            loader.set_epoch(3)
            states.append(list(itertools.islice(loader, 8 // saved_by))[-1].state())
    whole = merge(states)
    assert [left_over(dp_size, 2, whole) for dp_size in (1, 2)] == [order[8:]] * 2
    assert sorted(left_over(3, 3, whole)) == sorted(order[8:]), "other lanes make other batches of the same records"


@pytest.mark.parametrize("mesh", THREE_RANKS, ids=Mesh.describe)
@pytest.mark.parametrize("epochs", [1, 2])
def test_after_the_last_step_of_an_epoch_comes_the_first_of_the_next(epochs: int, mesh: Mesh) -> None:
    """K12: 100 records do not divide by 3 ranks; no epoch is empty, and no place lies behind the end."""
    settings: dict[str, Any] = {"batch_size": 8, "shuffle": SHUFFLE, "mesh": mesh}
    with make(range(100), epochs=2, **settings) as loader:
        whole = list(loader)
    assert [(batch.step, batch.epoch) for batch in whole] == [(step, step // 4) for step in range(8)]
    with make(range(100), epochs=epochs, **settings) as loader:
        batches = iter(loader)
        state = through_json(list(itertools.islice(batches, 4))[-1].state())
        batches.close()
    with make(range(100), epochs=epochs, **settings) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    assert [(batch.step, batch.epoch, numbers([batch])) for batch in rest] == [
        (batch.step, batch.epoch, numbers([batch])) for batch in whole[4:]
    ]


def test_training_goes_on_with_16_ranks_instead_of_10_and_evaluation_begins_at_0() -> None:
    """K13: evaluation has no state; what does not divide is said with both numbers."""

    def train(rank: int, dp_size: int, lanes: int = 80) -> Loader:
        return make(range(400), lanes=lanes, mesh=Mesh(dp_rank=rank, dp_size=dp_size), shuffle=SHUFFLE)

    with train(0, 1) as loader:
        order = numbers(loader)
    states = []
    for rank in range(10):
        with train(rank, 10) as loader:
            states.append(list(itertools.islice(loader, 2 * 8))[-1].state())
    whole = through_json(merge(states))
    ranks: list[list[Any]] = [[] for _ in range(16)]
    evaluated = []
    for rank, delivered in enumerate(ranks):
        with train(rank, 16) as loader:
            loader.load_state_dict(whole)
            delivered += loader
        with make(range(96), 3, mesh=Mesh(dp_rank=rank, dp_size=16)) as loader:
            evaluated.append(list(loader))
    assert numbers(in_steps(ranks)) == order[160:]
    assert [batch.step for batches in evaluated for batch in batches] == [0, 1] * 16
    assert sorted(numbers(in_steps(evaluated))) == list(range(96))
    with pytest.raises(ConfigError, match=r"Loader\(lanes=\): expected a positive multiple of dp_size \(16\), got 20"):
        train(0, 16, lanes=20)


# Shuffling


def test_the_epoch_reaches_workers_that_live_on() -> None:
    """K14: every epoch has its order, and has it again; the workers are the same all the time."""
    with make(range(100), 10, shuffle=SHUFFLE, preprocess=lambda _: os.getpid(), **PROCESSES) as loader:
        orders, workers = [], set()
        for epoch in (0, 1, 2, 0):
            loader.set_epoch(epoch)
            batches = list(loader)
            orders.append(rows(batches))
            workers |= set(numbers(batches))
    assert orders[0] == orders[3]
    assert len(set(map(tuple, orders))) == 3
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len(workers - {os.getpid()}) == len(workers) <= 2


def test_a_window_shuffle_is_repeatable_keeps_records_near_and_loses_none() -> None:
    """A027: nothing comes more than 255 places early, and a run resumes in the middle of a window."""

    def stream() -> Iterator[int]:
        yield from range(1000)

    def shuffled() -> Loader:
        return make(stream, 10, shuffle=Shuffle(window=256, seed=1))

    with shuffled() as loader:
        batches = list(loader)
    order = numbers(batches)
    assert sorted(order) == list(range(1000)) != order
    assert 200 < max(number - place for place, number in enumerate(order)) <= 255
    for position in (1, 26, 60, 99):
        with shuffled() as loader:
            loader.load_state_dict(through_json(batches[position - 1].state()))
            assert numbers(loader) == order[10 * position :]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_state_does_not_grow_with_what_is_shuffled(is_stream: bool) -> None:
    """B014: the order is computed, not stored."""

    def size_of_state(window: int) -> int:
        source: Any = (lambda: iter(range(5000))) if is_stream else range(5000)
        with make(source, 10, shuffle=Shuffle(window=window, seed=1)) as loader:
            return len(json.dumps(list(itertools.islice(loader, 300))[-1].state()))

    sizes = [size_of_state(window) for window in (16, 4096)]
    assert max(sizes) - min(sizes) < 20
    assert max(sizes) < 2048


# Who gets which record


def as_list(_: Path) -> Any:
    return [{"id": number} for number in range(36)]


def as_stream(_: Path) -> Any:
    return lambda: ({"id": number} for number in range(36))


def as_file(directory: Path) -> Any:
    path = directory / "ids.jsonl"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(36)))
    return JsonLines(path)


@pytest.mark.parametrize("buffer_size", [1, 5])
@pytest.mark.parametrize("source", [as_list, as_stream, as_file])
def test_four_ranks_share_one_shard(source: Callable[[Path], Any], buffer_size: int, tmp_path: Path) -> None:
    """K15: fewer shards than ranks leave no rank without data, however much is read at once."""
    ranks = []
    for rank in range(4):
        mesh = Mesh(dp_rank=rank, dp_size=4)
        with make(source(tmp_path), 3, preprocess=lambda row: row["id"], mesh=mesh, buffer_size=buffer_size) as loader:
            ranks.append(numbers(loader))
    assert [len(rank) for rank in ranks] == [9] * 4
    assert sorted(itertools.chain(*ranks)) == list(range(36))


def test_the_length_of_an_epoch_does_not_depend_on_workers() -> None:
    """K18."""
    for num_workers in (0, 1, 2, 5):
        with make(range(160), 8, workers=num_workers) as loader:
            assert len(list(loader)) == 20


def sliced(first: int, stop: int | None) -> Any:
    return range(30)[first:stop]


def skipped(first: int, stop: int | None) -> Any:
    return lambda: itertools.islice(iter(range(30)), first, stop)


@pytest.mark.parametrize(("first", "stop"), [(12, None), (0, 12)])
@pytest.mark.parametrize("limited", [sliced, skipped])
def test_a_part_of_the_data_is_the_same_part_in_the_second_pass(limited: Callable[..., Any], first: int, stop: int | None) -> None:
    """K19: shuffled, and twice."""
    with make(limited(first, stop), shuffle=SHUFFLE) as loader:
        passes = [numbers(loader) for _ in range(2)]
    assert [sorted(one) for one in passes] == [list(range(30)[first:stop])] * 2
    assert passes[0] != passes[1]


@pytest.mark.parametrize("axes", [("tp", "pp"), ("cp", "tp")])
def test_all_ranks_of_a_model_replica_get_the_same_packed_rows(axes: tuple[str, str]) -> None:
    """K20: one data coordinate, one sequence of rows with the same borders; another coordinate, other records."""
    lengths = [10, 9, 13, 8, 16, 24]  # five rows of 16
    source = [{"input_ids": [number] * lengths[number // 2]} for number in range(12)]
    replicas: list[set[str]] = [set(), set()]
    records: list[set[int]] = [set(), set()]
    for dp_rank, one, two in itertools.product(range(2), repeat=3):
        mesh = Mesh(
            dp_rank=dp_rank, dp_size=2, **{f"{axes[0]}_rank": one, f"{axes[0]}_size": 2, f"{axes[1]}_rank": two, f"{axes[1]}_size": 2}
        )
        with Loader(source, batch=Pack(16), collate=PretrainCollator(), mesh=mesh, **INLINE) as loader:
            batches = list(loader)
        assert [batch.step for batch in batches] == list(range(5))
        replicas[dp_rank].add(repr([(batch["input_ids"].tolist(), batch["cu_seqlens"].tolist()) for batch in batches]))
        records[dp_rank] |= set(rows(batches))
    assert [len(replica) for replica in replicas] == [1, 1]
    assert records == [set(range(0, 12, 2)), set(range(1, 12, 2))]


def test_a_dropped_tail_leaves_whole_steps_of_four_micro_batches() -> None:
    """K21, tail dropped: 19 records are two steps of 4 x 2."""
    with make(range(19), 2, lanes=4) as loader:
        assert [(batch.step, batch.lane) for batch in loader] == [(step, lane) for step in range(2) for lane in range(4)]
        counts = loader.stats()["records"]
    assert (counts["delivered_samples"], counts["dropped_records"] + counts["dropped_samples"]) == (16, 3)


def test_a_kept_tail_makes_one_more_step_of_four_micro_batches() -> None:
    """K21, tail kept: the third step has the 3 records that are left, one in each of three micro-batches, and a filler."""
    with make(range(19), 2, lanes=4, end="pad") as loader:
        batches = list(loader)
    assert [(batch.step, batch.lane) for batch in batches] == [(step, lane) for step in range(3) for lane in range(4)]
    assert [rows([batch]) for batch in batches[8:]] == [[16], [17], [18], []]
    assert [batch.is_filler for batch in batches] == [False] * 11 + [True]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
def test_no_two_ranks_get_the_same_record(dp_size: int) -> None:
    """A064, B023: all of 1001 records, but for what makes ranks uneven, which is counted."""
    ranks, num_dropped = [], 0
    for rank in range(dp_size):
        with make(range(1001), 5, shuffle=SHUFFLE, mesh=Mesh(dp_rank=rank, dp_size=dp_size), buffer_size=64) as loader:
            ranks.append(rows(loader))
            counts = loader.stats()["records"]
            num_dropped += counts["dropped_records"] + counts["dropped_samples"]
    delivered = list(itertools.chain(*ranks))
    assert len(set(delivered)) == len(delivered) == 1001 - num_dropped
    assert num_dropped == 1001 % (5 * dp_size)


def test_the_micro_batches_of_a_step_have_no_record_in_common() -> None:
    """B009, B016: two micro-batches on each of 4 ranks, or 8 ranks with one; the step is the same."""
    steps: dict[int, list[list[int]]] = {}
    for dp_size in (2, 4, 8):
        ranks = []
        for rank in range(dp_size):
            with make(range(240), 3, lanes=8, shuffle=SHUFFLE, mesh=Mesh(dp_rank=rank, dp_size=dp_size)) as loader:
                ranks.append(list(loader))
        steps[dp_size] = [rows(step) for _, step in itertools.groupby(in_steps(ranks), key=lambda batch: batch.step)]
        assert all(len(set(step)) == len(step) == 8 * 3 for step in steps[dp_size])
    assert steps[2] == steps[4] == steps[8]


# What a state says


def test_consumed_samples_and_tokens_are_those_of_the_batches() -> None:
    """B020, B033, B073, B074: also over resumes."""
    settings: dict[str, Any] = {"batch": FixedBatch(3), "collate": PretrainCollator(), "preprocess": some_or_many, **INLINE}
    num_samples, num_tokens = 0, 0
    state: Any = None
    for num_batches in (4, 1, 6):
        with Loader(documents(60), **settings) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in itertools.islice(loader, num_batches):
                num_samples += len(batch.samples)
                num_tokens += batch.num_tokens
                (lane,) = batch.state()["lanes"].values()
                assert (lane["counts"]["delivered_samples"], lane["counts"]["delivered_tokens"]) == (num_samples, num_tokens)
            state = through_json(loader.state_dict())


def test_a_file_that_changed_is_named_on_resume(tmp_path: Path) -> None:
    """B081."""
    path = tmp_path / "ids.jsonl"
    path.write_text('{"id": 1}\n' * 20)
    with make(JsonLines(path), preprocess=lambda row: row["id"]) as loader:
        state = list(itertools.islice(loader, 5))[-1].state()
    path.write_text('{"id": 1}\n' * 21)
    with (
        make(JsonLines(path), preprocess=lambda row: row["id"]) as loader,
        pytest.raises(ResumeError, match=r"source\.\w+: expected .*got"),
    ):
        loader.load_state_dict(state)


# What an error ends


@pytest.mark.parametrize("options", [THREADS, PROCESSES], ids=name_of)
def test_after_an_error_workers_begin_nothing_more(options: Options, tmp_path: Path) -> None:
    """A065."""

    def fail_at_5(number: int) -> int:
        (tmp_path / str(number)).touch()
        time.sleep(0.01)
        return number // (number - 5)

    with make(range(400), preprocess=fail_at_5, buffer_size=400, **options) as loader:
        delivered, error = drain(loader)
        num_begun = len(list(tmp_path.iterdir()))
        time.sleep(0.5)
        assert len(list(tmp_path.iterdir())) <= num_begun + options["workers"]
    assert len(delivered) == 5
    assert isinstance(error, PreprocessError)
    assert 6 <= num_begun < 100
