"""State follows delivery: what is loaded goes on with the next batch, bit for bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from aioloader import ConfigError, FixedBatch, Loader, Pack, PreprocessError, PretrainCollator, ResumeError
from tests.contract.cases import (
    INLINE,
    PROCESSES,
    SIDECAR_THREADS,
    THREAD_HOST,
    THREADS,
    Options,
    all_facts,
    collate,
    documents,
    drain,
    facts,
    name_of,
    numbers,
    some_or_many,
)

NUM_RECORDS = 60


class Lines:
    """An iterable, so that resuming goes through the cursor of a stream."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(documents(NUM_RECORDS))


KINDS: dict[str, Options] = {
    "fixed": {"batch": FixedBatch(3), "collate": PretrainCollator()},
    "fixed-padded": {"batch": FixedBatch(4), "collate": PretrainCollator(), "end": "pad"},
    "packed": {"batch": Pack(16, rows=2), "collate": PretrainCollator()},
    "packed-truncated": {"batch": Pack(8, rows=1, overflow="truncate"), "collate": PretrainCollator(), "end": "pad"},
    "lanes": {"batch": FixedBatch(2), "collate": PretrainCollator(), "lanes": 3},
    "packed-lanes": {"batch": Pack(16, rows=1), "collate": PretrainCollator(), "lanes": 2},
    "two-epochs": {"batch": Pack(16, rows=2), "collate": PretrainCollator(), "epochs": 2},
}


def make(kind: str, **options: Any) -> Loader:
    source = options.pop("source", None) or documents(NUM_RECORDS)
    return Loader(source, preprocess=some_or_many, **{**KINDS[kind], **options})


class Reference:
    """Two passes without interruption: what each batch says, and the state as of each."""

    def __init__(self, kind: str, source: Any = None) -> None:
        with make(kind, source=source, **INLINE) as loader:
            self.states = [loader.state_dict()]
            self.batches = [self._note(loader, batch) for batch in loader]
            self.length = len(self.batches)
            self.batches += all_facts(loader)

    def _note(self, loader: Loader, batch: Any) -> tuple[Any, ...]:
        self.states.append(json.loads(json.dumps(loader.state_dict())))
        return facts(batch)

    def tail(self, position: int) -> list[tuple[Any, ...]]:
        """Return what a loader delivers in one pass once it loaded the state as of `position` delivered batches."""
        return self.batches[position : self.length] if position < self.length else self.batches[self.length :]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(kind: str) -> Reference:
    return Reference(kind)


@pytest.mark.parametrize("options", [{**INLINE, "buffer_size": 4}, {**THREADS, "buffer_size": 9}], ids=name_of)
def test_resuming_at_every_batch_gives_the_tail(kind: str, reference: Reference, options: Options) -> None:
    assert reference.length > 8, "there must be something to resume"
    for position in range(reference.length + 1):
        with make(kind, **options) as loader:
            loader.load_state_dict(reference.states[position])
            assert all_facts(loader) == reference.tail(position), f"resumed after {position} batches"


def test_resuming_in_other_processes_gives_the_tail(kind: str, reference: Reference) -> None:
    position = reference.length if "two" in kind else reference.length // 2
    with make(kind, **PROCESSES, buffer_size=7) as loader:
        loader.load_state_dict(reference.states[position])
        assert all_facts(loader) == reference.tail(position), f"resumed after {position} batches"


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES, THREAD_HOST, SIDECAR_THREADS], ids=name_of)
def test_a_state_goes_from_any_host_to_any_other(options: Options) -> None:
    reference = Reference("packed")
    with make("packed", **options) as loader:
        iterator = iter(loader)
        first = [facts(next(iterator)) for _ in range(5)]
        state = json.dumps(loader.state_dict())
        iterator.close()
    assert first == reference.batches[:5]
    for other in (INLINE, {**THREADS, "workers": 3, "buffer_size": 2, "prefetch_batches": 1}):
        with make("packed", **other) as loader:
            loader.load_state_dict(json.loads(state))
            assert all_facts(loader) == reference.tail(5)


def test_a_stream_is_resumed_at_every_batch() -> None:
    reference = Reference("packed", Lines())
    for position in range(reference.length + 1):
        with make("packed", source=Lines(), **THREADS) as loader:
            loader.load_state_dict(reference.states[position])
            assert all_facts(loader) == reference.tail(position), f"resumed after {position} batches"


def test_resuming_twice_in_a_row_goes_on(kind: str, reference: Reference) -> None:
    delivered, state = [], reference.states[0]
    for _ in range(reference.length // 2):
        with make(kind, **THREADS) as loader:
            loader.load_state_dict(state)
            iterator = iter(loader)
            delivered += [facts(next(iterator)) for _ in range(2)]
            state = json.loads(json.dumps(loader.state_dict()))
            iterator.close()
    assert delivered == reference.batches[: len(delivered)]


def test_a_state_that_was_loaded_is_saved_as_it_was(kind: str, reference: Reference) -> None:
    with make(kind, **INLINE) as loader:
        for state in reference.states:
            loader.load_state_dict(state)
            assert loader.state_dict() == state


def test_states_are_small_and_of_constant_shape(kind: str, reference: Reference) -> None:
    assert all(len(json.dumps(state)) < 4096 for state in reference.states)
    shapes = {json.dumps(shape_of(state)) for state in reference.states}
    assert len(shapes) == 1


def shape_of(state: Any) -> Any:
    """Return the keys of a state; where the run ends and where the source stands may be unknown at its beginning."""
    if isinstance(state, dict):
        return {key: shape_of(value) for key, value in sorted(state.items()) if key not in ("end_epoch", "cursor")}
    return "list" if isinstance(state, list) else "value"


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=name_of)
def test_the_state_after_an_older_batch_that_is_still_held(options: Options) -> None:
    reference = Reference("packed")
    with make("packed", **options) as loader:
        iterator = iter(loader)
        held = [next(iterator) for _ in range(6)]
        state = loader.state_dict(after=held[2])
        assert loader.state_dict() == loader.state_dict(after=held[5])
        iterator.close()
    state_after_close = held[2].state()
    assert state_after_close == state
    with make("packed", **INLINE) as loader:
        loader.load_state_dict(state)
        assert all_facts(loader) == reference.tail(3)


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=name_of)
def test_a_state_is_not_changed_by_what_comes_after(options: Options) -> None:
    with make("packed", **options) as loader:
        states = []
        for _ in loader:
            state = loader.state_dict()
            states.append((state, json.dumps(state)))
    assert all(json.dumps(state) == text for state, text in states)


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=name_of)
def test_an_early_break_can_be_resumed_or_left(options: Options) -> None:
    reference = Reference("packed")
    with make("packed", **options) as loader:
        for number, _ in enumerate(loader):
            if number == 3:
                break
        state = loader.state_dict()
        assert all_facts(loader) == reference.tail(0), "a pass that was left begins again"
        assert all_facts(loader) == reference.batches[reference.length :], "and the next one is the next epoch"
    with make("packed", **options) as loader:
        loader.load_state_dict(state)
        assert all_facts(loader) == reference.tail(4)
        assert all_facts(loader) == reference.batches[reference.length :]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_before_the_first_batch(num_workers: int) -> None:
    """K06."""
    with make("fixed", workers=num_workers) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
    with make("fixed", workers=num_workers) as loader:
        loader.load_state_dict(state)
        assert all_facts(loader) == Reference("fixed").tail(0)


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=name_of)
def test_a_state_after_a_caught_error_loses_nothing(options: Options) -> None:
    def fail_at_20(number: int) -> int:
        if number == 20:
            raise ValueError("bad record")
        return number

    def mended(number: int) -> int:
        return number

    settings: Options = {"batch": FixedBatch(3), "collate": collate, "end": "pad", **options}
    with Loader(range(30), preprocess=fail_at_20, **settings) as loader:
        before, error = drain(loader)
        assert type(error) is PreprocessError
        state = json.loads(json.dumps(loader.state_dict()))
        assert before == list(range(20))
        loader.load_state_dict(state)
        again, error = drain(loader)
        assert again == []
        assert type(error) is PreprocessError
    with Loader(range(30), preprocess=mended, **settings) as loader:
        loader.load_state_dict(state, accept=["preprocess"])
        assert numbers(loader) == list(range(20, 30))


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
def test_epochs(options: Options) -> None:
    settings: Options = {"batch": FixedBatch(2), "collate": collate, **options}
    with Loader(range(6), epochs=1, **settings) as loader:
        assert [[batch.epoch for batch in loader] for _ in range(3)] == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    with Loader(range(6), epochs=3, **settings) as loader:
        for first in (0, 3):
            batches = list(loader)
            assert [batch.epoch for batch in batches] == [epoch for epoch in range(first, first + 3) for _ in range(3)]
            assert numbers(batches) == [*range(6)] * 3
    with Loader(range(6), epochs=None, **settings) as loader:
        batches = list(itertools.islice(loader, 31))
        assert [batch.step for batch in batches] == list(range(31))
        assert batches[-1].epoch == 10
        state = batches[-2].state()
    with Loader(range(6), epochs=None, **settings) as loader:
        loader.load_state_dict(state)
        batches = list(itertools.islice(loader, 4))
        assert [(batch.step, batch.epoch) for batch in batches] == [(30, 10), (31, 10), (32, 10), (33, 11)]


def test_a_state_of_the_middle_epoch_ends_where_the_interrupted_pass_would_have_ended() -> None:
    settings: Options = {"batch": FixedBatch(3), "collate": collate, "epochs": 3, **INLINE}
    with Loader(range(12), **settings) as loader:
        state = list(loader)[2 * 4 + 1].state()
    with Loader(range(12), **settings) as loader:
        loader.load_state_dict(state)
        batches = list(loader)
    assert [(batch.epoch, numbers([batch])) for batch in batches] == [(2, [6, 7, 8]), (2, [9, 10, 11])]


def test_set_epoch_before_a_pass() -> None:
    with Loader(range(4), batch=FixedBatch(2), collate=collate, **INLINE) as loader:
        loader.set_epoch(5)
        assert {batch.epoch for batch in loader} == {5}
        assert loader.epoch == 6
        loader.set_epoch(0)
        assert {batch.epoch for batch in loader} == {0}


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=["inline", "threads", "processes"])
def test_whoever_numbers_epochs_gets_none_of_them_twice(options: Options) -> None:
    """F8: a state saved after the last micro-batch of epoch 1, and a training loop that sets each epoch by itself."""
    with Loader(range(6), batch=FixedBatch(2), collate=collate, **options) as loader:
        loader.set_epoch(1)
        state = list(loader)[-1].state()
    found = []
    with Loader(range(6), batch=FixedBatch(2), collate=collate, **options) as loader:
        loader.load_state_dict(state)
        for epoch in range(1, 4):
            loader.set_epoch(epoch)
            found.append([batch.epoch for batch in loader])
        loader.load_state_dict(state)
        found.append([batch.epoch for batch in loader])
    assert found == [[], [2] * 3, [3] * 3, [2] * 3], "without set_epoch no loop is empty"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_after_whole_epochs(num_workers: int) -> None:
    """K02, and K12: no pass is empty."""
    settings: Options = {"batch": FixedBatch(2), "collate": collate, "workers": num_workers, "host": "thread", "pool": "thread"}
    with Loader(range(72), **settings) as loader:
        passes = [all_facts(loader) for _ in range(3)]
        state = json.loads(json.dumps(loader.state_dict()))
        passes += [all_facts(loader) for _ in range(2)]
    with Loader(range(72), **settings) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert [all_facts(loader) for _ in range(2)] == passes[3:]
    assert [len(one) for one in passes] == [36] * 5


def test_loading_under_a_live_iterator_is_refused() -> None:
    """K03."""
    with Loader(range(50), batch=FixedBatch(1), collate=collate, **THREADS) as loader:
        state = list(itertools.islice(loader, 12))[-1].state()
        iterator = iter(loader)
        with pytest.raises(ConfigError, match=r"load_state_dict: expected no live iterator, got .*; call it before the loop"):
            loader.load_state_dict(state)
        assert numbers([next(iterator)]) == [0]
        iterator.close()
        loader.load_state_dict(state)
        assert numbers(itertools.islice(loader, 3)) == [12, 13, 14]
        state = loader.state_dict()
    with Loader(range(50), batch=FixedBatch(1), collate=collate, **THREADS) as loader:
        loader.load_state_dict(state)
        assert numbers(itertools.islice(loader, 1)) == [15]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_saved_without_workers_is_loaded(num_workers: int) -> None:
    """K05."""
    with Loader(range(20), batch=FixedBatch(2), collate=collate, workers=0) as loader:
        state = list(itertools.islice(loader, 3))[-1].state()
    with Loader(range(20), batch=FixedBatch(2), collate=collate, workers=num_workers) as loader:
        loader.load_state_dict(state)
        assert numbers(loader) == list(range(6, 20))


def test_positions_count_on_over_several_loads() -> None:
    """K07."""
    state: Any = None
    for first, count in ((0, 5), (5, 2), (7, 7)):
        with Loader(range(14), batch=FixedBatch(1), collate=collate, **INLINE) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = list(itertools.islice(loader, count))
            state = loader.state_dict()
        assert numbers(batches) == list(range(first, first + count))
        assert [batch.step for batch in batches] == list(range(first, first + count))


def test_resuming_in_a_later_epoch() -> None:
    """K08, unshuffled."""
    with Loader(range(12), batch=FixedBatch(3), collate=collate, **INLINE) as loader:
        passes = [list(loader) for _ in range(3)]
    state = passes[2][1].state()
    with Loader(range(12), batch=FixedBatch(3), collate=collate, **INLINE) as loader:
        loader.load_state_dict(state)
        assert all_facts(loader) == all_facts(passes[2][2:])


def test_a_state_of_other_data_is_refused() -> None:
    """K09."""
    with Loader(range(50), batch=FixedBatch(1), collate=collate, **INLINE) as loader:
        state = list(itertools.islice(loader, 20))[-1].state()
    with (
        Loader(range(80), batch=FixedBatch(1), collate=collate, **INLINE) as loader,
        pytest.raises(ResumeError, match=r"source\.num_records: expected 80 \(this loader\), got 50 \(the state\)"),
    ):
        loader.load_state_dict(state)


def test_a_resumed_loader_keeps_its_options() -> None:
    """K10."""
    with Loader(range(18), batch=FixedBatch(4), collate=collate, end="drop", **INLINE) as loader:
        state = next(iter(loader)).state()
    with Loader(range(18), batch=FixedBatch(4), collate=collate, end="drop", **INLINE) as loader:
        loader.load_state_dict(state)
        assert [numbers([batch]) for batch in loader] == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    with (
        Loader(range(18), batch=FixedBatch(4), collate=collate, end="pad", **INLINE) as loader,
        pytest.raises(ResumeError, match=r"end: expected 'pad' \(this loader\), got 'drop' \(the state\)"),
    ):
        loader.load_state_dict(state)


def test_counts_close_after_every_resume(kind: str, reference: Reference) -> None:
    """Delivered, dropped and filtered make up all there was, however the run was cut."""
    with make(kind, **INLINE) as loader:
        list(loader)
        whole = loader.stats()["records"]
    for position in range(0, reference.length, 3):
        with make(kind, **THREADS) as loader:
            loader.load_state_dict(reference.states[position])
            list(loader)
            assert loader.stats()["records"] == whole
    assert whole["records"] + whole["dropped_records"] == NUM_RECORDS * KINDS[kind].get("epochs", 1)
