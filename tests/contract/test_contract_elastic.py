"""Elastic: what a lane delivers does not depend on how many ranks serve the lanes, and a run goes on with any number of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from aioloader import (
    Bucket,
    ConfigError,
    FixedBatch,
    Loader,
    Mesh,
    Mixture,
    Pack,
    PretrainCollator,
    Ramp,
    ResumeError,
    SftCollator,
    Shuffle,
    TokenBudget,
)
from aioloader.state import describe, diff, merge, split
from tests.contract.cases import PROCESSES, THREADS, documents, some_or_many

NUM_LANES = 12
NUM_RECORDS = 330
Entry = tuple[int, int, tuple[Any, ...], str]


class Lines:
    """A stream that nobody can deal out: every rank reads it and leaves out what belongs to others."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(documents(NUM_RECORDS))


MIXTURE = Mixture(
    {"a": (documents(240), 0.7), "b": (Lines(), 0.3)},
    schedule=Ramp([(0, {"a": 9, "b": 1}), (150, {"a": 1, "b": 3})]),
    stop="all_exhausted",
    repeats={"a": 2, "b": 1},
)
SOURCES: dict[str, Any] = {"indexed": documents(NUM_RECORDS), "stream": Lines(), "mixture": MIXTURE}
BATCHINGS: dict[str, dict[str, Any]] = {
    "fixed": {"batch": FixedBatch(2), "collate": PretrainCollator()},
    "packed": {"batch": Pack(16, rows=1), "collate": PretrainCollator()},
    "best-fit": {"batch": Pack(16, rows=2, strategy="best_fit", open_bins=4), "collate": PretrainCollator()},
    "bucket": {"batch": Bucket((4, 8, 16), batch_size=2), "collate": SftCollator(pad_token_id=0)},
    "budget": {"batch": TokenBudget(24), "collate": SftCollator(pad_token_id=0)},
}


def with_labels(record: dict[str, Any]) -> Any:
    """The same as `some_or_many`, for collators that want labels."""
    made = some_or_many(record)
    samples = made if isinstance(made, list) else [made]
    return made and [{**sample, "labels": sample["input_ids"]} for sample in samples]


def make(source: str, batching: str, dp_rank: int, dp_size: int, **options: Any) -> Loader:
    mesh = Mesh(dp_rank=dp_rank, dp_size=dp_size)
    defaults = {"workers": 0, "lanes": NUM_LANES, "shuffle": Shuffle(window=32, seed=7), "preprocess": with_labels}
    return Loader(SOURCES[source], mesh=mesh, **{**defaults, **BATCHINGS[batching], **options})


def entry_of(batch: Any) -> Entry:
    digest = hashlib.blake2b(b"".join(batch[name].numpy().tobytes() for name in sorted(batch)), digest_size=8).hexdigest()
    return (batch.step, batch.lane, tuple((sample.record, sample.sub) for sample in batch.samples), digest)


def run(
    source: str, batching: str, dp_size: int, state: Any = None, num_steps: int | None = None, **options: Any
) -> tuple[list[Entry], Any]:
    """Play the ranks one after another; return the log in (step, lane) order, and the merged state after `num_steps`."""
    log: list[Entry] = []
    states = []
    for rank in range(dp_size):
        with make(source, batching, rank, dp_size, **options) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            batches = iter(loader)
            log += map(entry_of, itertools.islice(batches, None if num_steps is None else num_steps * NUM_LANES // dp_size))
            states.append(batches.state())
    random.Random(0).shuffle(states)
    return sorted(log), merge(states) if num_steps is not None else None


def common(log: list[Entry]) -> list[Entry]:
    """Return the steps that all lanes have: how ranks agree on the last one needs a process group, and is tested with one."""
    last = min(max((step for step, lane, _, _ in log if lane == number), default=-1) for number in range(NUM_LANES))
    return [entry for entry in log if entry[0] <= last]


class Wholes(dict[tuple[str, str], list[Entry]]):
    """Uninterrupted runs on a single rank, made when they are asked for."""

    def __missing__(self, key: tuple[str, str]) -> list[Entry]:
        self[key] = common(run(*key, 1)[0])
        return self[key]


@pytest.fixture(scope="module")
def whole() -> Wholes:
    return Wholes()


@pytest.mark.parametrize("dp_size", [2, 3, 4, 6, 12])
@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("source", SOURCES)
def test_global_batches_are_the_same_for_every_number_of_ranks(source: str, batching: str, dp_size: int, whole: Any) -> None:
    assert len(whole[source, batching]) >= 2 * NUM_LANES
    log, _ = run(source, batching, dp_size)
    assert common(log) == whole[source, batching]


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_chain_of_resumes_on_other_numbers_of_ranks(source: str, batching: str, whole: Any) -> None:
    chosen = random.Random(source + batching)
    log: list[Entry] = []
    state = None
    for dp_size in (12, 4, 6, 1, 3):
        part, state = run(source, batching, dp_size, state, chosen.randint(0, 1))
        log += part
    rest, _ = run(source, batching, 2, state)
    assert common(log + rest) == whole[source, batching]


@pytest.mark.parametrize("options", [PROCESSES, THREADS, {**PROCESSES, "workers": 5, "buffer_size": 7}], ids=["sidecar", "threads", "five"])
def test_workers_and_hosts_do_not_matter(options: dict[str, Any], whole: Any) -> None:
    first, state = run("stream", "best-fit", 3, None, 2, **options)
    rest, _ = run("stream", "best-fit", 2, state, **options)
    assert common(first + rest) == whole["stream", "best-fit"]


def test_a_step_that_was_begun_is_finished_by_other_ranks(whole: Any) -> None:
    states, log = [], []
    for rank in range(4):  # three lanes each, of which one has its part of step 1
        with make("indexed", "fixed", rank, 4) as loader:
            batches = iter(loader)
            log += list(map(entry_of, itertools.islice(batches, 4)))
            states.append(batches.state())
    rest, _ = run("indexed", "fixed", 6, merge(states))
    assert common(sorted(log + rest)) == whole["indexed", "fixed"]


def saved(num_batches: int = 3, dp_size: int = 3, **options: Any) -> list[Any]:
    states = []
    for rank in range(dp_size):
        with make("indexed", "fixed", rank, dp_size, **options) as loader:
            batches = iter(loader)
            for _ in itertools.islice(batches, num_batches):
                pass
            states.append(batches.state())
    return states


def test_what_does_not_belong_together_is_not_merged() -> None:
    states = saved()
    with pytest.raises(ResumeError, match=r"state of rank 1: .*missing"):
        merge([states[0], states[2]])
    with pytest.raises(ResumeError, match=r"state of rank 2: .*2 of them"):
        merge([*states, states[2]])
    with pytest.raises(ResumeError, match=r"fingerprint.seed.*as on rank 0"):
        merge([states[0], saved(seed=9)[1], states[2]])
    with pytest.raises(ResumeError, match="num_lanes"):
        merge([states[0], saved(lanes=6)[1], states[2]])
    with pytest.raises(ResumeError, match="micro-batches delivered"):
        merge([*states[:2], saved(num_batches=9)[2]])
    with pytest.raises(ResumeError, match=r"states: .*none"):
        merge([])


def test_a_merged_state_says_what_it_does_not_fit() -> None:
    state = merge(saved())
    with pytest.raises(ConfigError, match=r"dp_size.*divisor of the 12 lanes.*1, 2, 3, 4, 6, 12.*got 5"):
        split(state, 5)
    with pytest.raises(ResumeError, match="merged state"):
        split(saved()[0], 2)
    with make("indexed", "fixed", 0, 1) as loader, pytest.raises(ResumeError, match=r"aioloader.state.merge"):
        loader.load_state_dict(saved()[0])
    with make("indexed", "fixed", 0, 1, shuffle=Shuffle(window=64)) as loader, pytest.raises(ResumeError, match=r"shuffle.window"):
        loader.load_state_dict(state)


def test_split_undoes_merge() -> None:
    states = saved()
    merged = merge(states)
    assert merge([merged]) == merged
    again = split(merged, 3)
    assert [state["lanes"] for state in again] == [state["lanes"] for state in states]
    assert merge(again) == merged


def test_describe_and_diff() -> None:
    early, late = merge(saved(4)), merge(saved(8))
    text = describe(late)
    assert "all 3 ranks, lanes 0, 1, 2" in text
    assert "after step 2; epochs 0" in text
    assert "delivered samples: 48" in text
    assert ("lanes.0.step", 1, 2) in diff(early, late)
    assert diff(early, early) == []


def test_a_source_is_added_to_a_mixture_on_purpose_and_all_ranks_agree_from_where() -> None:
    def loader(rank: int, dp_size: int, weights: dict[str, float]) -> Loader:
        mixture = Mixture({name: (documents(300), weight) for name, weight in weights.items()}, stop="all_exhausted")
        options: dict[str, Any] = {"batch": FixedBatch(2), "collate": PretrainCollator(), "shuffle": Shuffle(seed=3), "workers": 0}
        return Loader(mixture, mesh=Mesh(dp_rank=rank, dp_size=dp_size), preprocess=some_or_many, lanes=6, **options)

    before, states = [], []
    for rank in range(3):
        with loader(rank, 3, {"a": 1, "b": 1}) as old:
            batches = iter(old)
            before += [(sample.record, sample.sub) for batch in itertools.islice(batches, 8) for sample in batch.samples]
            states.append(json.loads(json.dumps(batches.state())))
    after: list[Any] = []
    for rank in range(2):
        with loader(rank, 2, {"a": 1, "b": 1, "c": 2}) as new:
            with pytest.raises(ResumeError, match=r"source.sources.c.kind"):
                new.load_state_dict(merge(states))
            with pytest.raises(ResumeError, match=r"(?s)lanes: .*merge"):
                new.load_state_dict(states[rank], accept=["source"])
            new.load_state_dict(merge(states), accept=["source"])
            batches = iter(new)
            after += [(sample.record, sample.sub) for batch in itertools.islice(batches, 60) for sample in batch.samples]
            assert re.search(r"source c: [1-9]\d* records drawn", describe(batches.state()))
            (change,) = batches.state()["source"]["cursor"]["drawer"]["changes"]
            assert change["added"] == ["c"]
    shards = Counter(shard.partition("/")[0] for shard, _ in {record for record, _ in after})
    assert shards["c"] == pytest.approx(shards["a"] + shards["b"], abs=25)  # some of a and b were drawn before
    assert len(set(before + after)) == len(before + after)


def _without(state: Any, path: tuple[str, ...]) -> Any:
    copy = json.loads(json.dumps(state))
    part = copy
    for name in path[:-1]:
        part = part[name]
    del part[path[-1]]
    return copy


def _paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, part in value.items() if isinstance(value, dict) else ():
        yield (*path, name)
        if (*path, name) not in {("fingerprint",), ("source", "cursor")}:
            yield from _paths(part, (*path, name))


def test_a_state_that_lost_any_part_is_refused() -> None:
    with make("indexed", "best-fit", 0, 6) as loader:
        batches = iter(loader)
        for _ in itertools.islice(batches, 5):
            pass
        state = json.loads(json.dumps(batches.state()))
    paths = list(_paths(state))
    assert len(paths) > 40
    for path in paths:
        with make("indexed", "best-fit", 0, 6) as loader, pytest.raises(ResumeError, match=path[-1]):
            loader.load_state_dict(_without(state, path))


def some(record: dict[str, Any]) -> Any:
    """Filter, and keep one sample of the others."""
    return None if record["number"] % 7 == 3 else {"input_ids": record["tokens"]}


def test_indexed_data_are_dealt_to_any_number_of_lanes_exactly_once() -> None:
    def play(num_lanes: int, state: Any, num_steps: int | None) -> tuple[list[Any], Any]:
        seen, states = [], []
        for rank in range(num_lanes):
            with make("indexed", "fixed", rank, num_lanes, lanes=num_lanes, preprocess=some) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                batches = iter(loader)
                seen += [sample.row for batch in itertools.islice(batches, num_steps) for sample in batch.samples]
                states.append(batches.state())
        return seen, merge(states) if num_steps is not None else None

    expected = [number for number in range(NUM_RECORDS) if number % 7 != 3]
    seen: list[int] = []
    state = None
    for num_lanes, num_steps in ((4, 5), (5, 4), (3, 6), (8, 2)):
        part, state = play(num_lanes, state, num_steps)
        seen += part
    assert state is not None
    steps = {lane["step"] for lane in state["lanes"].values()}
    assert steps == {5 + 4 + 6 + 2}
    seen += play(1, state, None)[0]
    assert len(seen) == len(set(seen))
    assert set(seen) <= set(expected)
    assert len(seen) >= len(expected) - 2  # a last micro-batch that is not full is dropped
    counts = Counter[str]()
    with make("indexed", "fixed", 0, 1, lanes=1, preprocess=some) as loader:
        loader.load_state_dict(state)
        for _ in loader:
            pass
        counts.update(loader.stats()["records"])
    assert counts["records"] == NUM_RECORDS
    assert counts["delivered_samples"] + counts["filtered_records"] + counts["dropped_samples"] == NUM_RECORDS


def test_what_cannot_be_dealt_anew_says_why() -> None:
    state = merge(saved(num_batches=5))  # some_or_many made several samples of one record, of which one was delivered
    with make("indexed", "fixed", 0, 1, lanes=5) as loader, pytest.raises(ResumeError, match=r"records: .*delivered in part"):
        loader.load_state_dict(state)
    with make("stream", "fixed", 0, 1, lanes=5) as loader, pytest.raises(ResumeError, match="num_lanes"):
        loader.load_state_dict(state)
