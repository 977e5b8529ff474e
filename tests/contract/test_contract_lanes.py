"""Lanes: what each one delivers does not depend on how many ranks there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioloader import AlreadySharded, BatchError, FixedBatch, Loader, Mesh, Pack, PretrainCollator, ResumeError, Shuffle, SourceError
from aioloader.state import merge
from tests.contract.cases import INLINE, PROCESSES, THREADS, Options, collate, documents, drain, name_of, numbers, some_or_many

BATCHINGS: dict[str, Options] = {
    "fixed": {"batch": FixedBatch(2), "collate": PretrainCollator()},
    "packed": {"batch": Pack(16, rows=1), "collate": PretrainCollator()},
}
Key = tuple[int, int]


def micro_batches(dp_size: int, **options: Any) -> list[tuple[Key, Any]]:
    """Return ((step, lane), content) of all ranks, in the order in which each delivers."""
    found = []
    for dp_rank in range(dp_size):
        with Loader(documents(97), preprocess=some_or_many, lanes=4, mesh=Mesh(dp_rank=dp_rank, dp_size=dp_size), **options) as loader:
            found += [((batch.step, batch.lane), (batch.samples, batch["input_ids"].tolist(), batch.epoch)) for batch in loader]
    return found


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("options", [INLINE, {**THREADS, "buffer_size": 6}], ids=name_of)
def test_each_step_and_lane_is_the_same_for_every_number_of_ranks(batching: str, options: Options) -> None:
    whole = micro_batches(1, **BATCHINGS[batching], **INLINE)
    assert [key for key, _ in whole] == [(step, lane) for step in range(len(whole) // 4) for lane in range(4)]
    for dp_size in (1, 2, 4):
        found = micro_batches(dp_size, **BATCHINGS[batching], **options)
        num_steps = [len({step for (step, lane), _ in found if lane % dp_size == dp_rank}) for dp_rank in range(dp_size)]
        common = min(num_steps)
        assert common >= len(whole) // 4, "a rank alone ends with its own lanes, and never before the whole job would"
        assert {key: content for key, content in found if key[0] < len(whole) // 4} == dict(whole)


def test_the_union_of_ranks_is_the_input_and_disjoint() -> None:
    for dp_size in (1, 2, 4):
        ranks = []
        for dp_rank in range(dp_size):
            mesh = Mesh(dp_rank=dp_rank, dp_size=dp_size)
            with Loader(range(96), batch=FixedBatch(3), collate=collate, lanes=4, mesh=mesh, **THREADS) as loader:
                ranks.append(numbers(loader))
        assert sorted(number for rank in ranks for number in rank) == list(range(96))
        assert [len(rank) for rank in ranks] == [96 // dp_size] * dp_size
        assert all({number % 4 % dp_size for number in rank} == {dp_rank} for dp_rank, rank in enumerate(ranks))


def test_every_rank_delivers_as_many_and_what_is_dropped_is_counted() -> None:
    """103 records on 4 ranks: 100 delivered, 3 dropped."""
    counts = []
    for dp_rank in range(4):
        mesh = Mesh(dp_rank=dp_rank, dp_size=4)
        with Loader(range(103), batch=FixedBatch(5), collate=collate, mesh=mesh, **THREADS) as loader:
            assert len(list(loader)) == 5
            counts.append(loader.stats()["records"])
    assert sum(count["delivered_samples"] for count in counts) == 100
    assert sum(count["dropped_records"] for count in counts) == 3


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=name_of)
def test_preprocessing_runs_once_per_record_in_the_job(options: Options, tmp_path: Path) -> None:
    """Each call leaves a mark; the file is shared by all ranks."""
    log = tmp_path / "calls"

    def note(number: int) -> int:
        with open(log, "ab") as file:
            file.write(b"%d\n" % number)
        return number

    for dp_rank in range(4):
        mesh = Mesh(dp_rank=dp_rank, dp_size=4)
        with Loader(range(100), preprocess=note, batch=FixedBatch(5), collate=collate, mesh=mesh, **options) as loader:
            assert len(list(loader)) == 5
        assert len(log.read_text().split()) == (dp_rank + 1) * 25
    assert sorted(map(int, log.read_text().split())) == list(range(100))


def test_tensor_and_pipeline_peers_deliver_the_same() -> None:
    """K20: data are dealt by the data-parallel coordinate alone."""
    seen: dict[int, set[tuple[int, ...]]] = {}
    for dp_rank in range(2):
        for tp_rank in range(2):
            for pp_rank in range(2):
                mesh = Mesh(dp_rank=dp_rank, dp_size=2, tp_rank=tp_rank, tp_size=2, pp_rank=pp_rank, pp_size=2)
                with Loader(range(40), batch=FixedBatch(4), collate=collate, mesh=mesh, **INLINE) as loader:
                    seen.setdefault(dp_rank, set()).add(tuple(numbers(loader)))
    assert seen == {dp_rank: {tuple(range(dp_rank, 40, 2))} for dp_rank in range(2)}


def test_a_state_of_another_rank_or_number_of_lanes_is_refused() -> None:
    settings: Options = {"batch": FixedBatch(2), "collate": collate, **INLINE}
    with Loader(range(40), lanes=4, mesh=Mesh(dp_rank=0, dp_size=2), **settings) as loader:
        state = next(iter(loader)).state()
    for mesh, lanes, text in (
        (Mesh(dp_rank=1, dp_size=2), 4, r"dp_rank: expected 1 \(this loader\), got 0"),
        (Mesh(), 4, r"dp_size: expected 1 \(this loader\), got 2"),
        (Mesh(dp_rank=0, dp_size=2), 8, r"num_lanes: expected 8 \(this loader\), got 4"),
    ):
        with Loader(range(40), lanes=lanes, mesh=mesh, **settings) as loader, pytest.raises(ResumeError, match=text):
            loader.load_state_dict(state, accept=["num_lanes", "dp_rank", "dp_size"])


def test_a_rank_whose_lane_fails_still_delivers_what_came_before() -> None:
    def fail(number: int) -> int:
        return 1 // (number - 21) and number

    with Loader(
        range(80), preprocess=fail, batch=FixedBatch(2), collate=collate, lanes=4, mesh=Mesh(dp_rank=1, dp_size=2), **THREADS
    ) as loader:
        delivered, error = drain(loader)
    assert sorted(delivered) == [number for number in range(21) if number % 2 and number not in (20, 21)]
    assert error is not None
    assert "record sequence[21]" in str(error)


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
def test_what_comes_before_a_failing_upstream_is_delivered_also_of_an_incomplete_block(options: Options) -> None:
    def fails_at_6() -> Iterator[int]:
        yield from range(6)
        raise OSError("gone")

    with Loader(fails_at_6, batch=FixedBatch(1), collate=collate, mesh=Mesh(), lanes=4, **options) as loader:
        delivered, error = drain(loader)
    assert delivered == list(range(6))
    assert isinstance(error, SourceError)


class Broken:
    """A user's own batching with a mistake in it."""

    def __init__(self) -> None:
        self._inner = FixedBatch(1).start()

    def start(self) -> Any:
        return Broken()

    def fingerprint(self) -> Any:
        return {"kind": "Broken"}

    def push(self, item: Any) -> Any:
        if item.seq == 3:
            raise ZeroDivisionError("a mistake")
        return self._inner.push(item)

    def __getattr__(self, name: str) -> Any:
        if name == "push_run":
            raise AttributeError(name)
        return getattr(self.__dict__["_inner"], name)


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
def test_a_mistake_in_a_batching_of_the_users_own(options: Options) -> None:
    with Loader(range(9), batch=Broken(), collate=collate, **options) as loader:
        delivered, error = drain(loader)
    assert delivered == [0, 1, 2]
    assert isinstance(error, BatchError)
    assert isinstance(error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("shuffle", [None, Shuffle(window=8)])
def test_a_stream_that_is_split_already_is_read_whole_on_each_rank(shuffle: Shuffle | None) -> None:
    def make(rank: int) -> Loader:
        source = AlreadySharded(range(100 * rank, 100 * rank + 24))
        options: dict[str, Any] = {"batch": FixedBatch(4), "collate": collate, "workers": 0, "lanes": 6, "shuffle": shuffle}
        return Loader(source, mesh=Mesh(dp_rank=rank, dp_size=3), **options)

    states = []
    for rank in range(3):
        with make(rank) as loader:
            batches = [batch["x"].tolist() for batch in loader]
        assert sorted(number for batch in batches for number in batch) == list(range(100 * rank, 100 * rank + 24))
        with make(rank) as loader:
            started = iter(loader)
            assert [next(started).lane, next(started).lane] == [rank, rank + 3]
            states.append(started.state())
        with make(rank) as loader:
            loader.load_state_dict(states[-1])
            assert [batch["x"].tolist() for batch in loader] == batches[2:]
    with pytest.raises(ResumeError, match=r"(?s)split already.*AlreadySharded"):
        merge(states)
