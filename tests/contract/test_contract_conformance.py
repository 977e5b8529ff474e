"""Every source in every order with every batching and collator goes on, from each delivered batch, bit for bit as if never interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from aioloader import Bucket, FixedBatch, Loader, Pack, PretrainCollator, SftCollator, Shuffle, SourceError, StackCollator, TokenBudget
from tests.contract.cases import PROCESSES, SIDECAR_THREADS, THREAD_HOST, THREADS, Options, collate, documents, numbers
from tests.contract.order_cases import Facts, Prepare, facts_of, make_source, rows_as_arrays, through_json

NUM_RECORDS = 14
STRETCH = (2, 5)
"""Records that are all filtered."""

SOURCES = (
    "list",
    "shards",
    "stream",
    "bookmarked stream",
    "async stream",
    "mixture with steps",
    "mixture with a ramp",
    "mixture by tokens",
)
ORDERS: dict[str, Shuffle | None] = {"as it comes": None, "shuffled": Shuffle(window=5, shards_in_window=2)}
BATCHINGS: dict[str, Any] = {
    "fixed": FixedBatch(2),
    "budget": TokenBudget(22, overflow="alone"),
    "bucket": Bucket((4, 8, 16), batch_size=2, lookahead=5, max_age=6),
    "greedy": Pack(12, rows=1),
    "best fit": Pack(20, rows=1, strategy="best_fit", open_bins=2),
    "first fit": Pack(14, rows=1, strategy="first_fit", open_bins=2, max_age=5),
}
COLLATORS: dict[str, Any] = {
    "pretrain": PretrainCollator(),
    "sft": SftCollator(pad_token_id=0),
    "own": rows_as_arrays,
    "stack": StackCollator(),
}
HOSTS: tuple[Options, ...] = (
    {**PROCESSES, "buffer_size": 7},
    {**THREADS, "workers": 3, "buffer_size": 2, "prefetch_batches": 1},
    {**THREAD_HOST, "workers": 1, "buffer_size": 1},
    {**SIDECAR_THREADS, "prefetch_batches": 5},
)
MAX_STATE_BYTES = 4096
sizes: dict[int, str] = {}
"""The state sizes of all tests, for the last one to tell the largest."""


class Run:
    """A configuration, run once without interruption: what each batch says, and the state as of each."""

    def __init__(self, name: str, source: str, num_records: int = NUM_RECORDS, **options: Any) -> None:
        self.name = name
        self.source = source
        self.num_records = num_records
        self.options = {
            "preprocess": Prepare(STRETCH, is_random=True),
            "collate": rows_as_arrays,
            "lanes": 2,
            "epochs": 3,
            "seed": 3,
            "workers": 0,
            **options,
        }
        with self.loader() as loader:
            self.states = [through_json(loader.state_dict())]
            self.told = [self._note(batch) for batch in loader]
            self.num_batches = len(self.told)
            self.states.append(through_json(loader.state_dict()))  # of a pass that has come to its end
            self.told += [self._note(batch) for batch in islice(loader, 2)]
        epochs = [facts[2] for facts, _ in self.told[: self.num_batches]]
        self.half = epochs.index(2) + epochs.count(2) // 2
        """Batches of two epochs and a half."""
        assert self.half >= 4, "there must be something to resume"

    def loader(self, **options: Any) -> Loader:
        return Loader(make_source(self.source, self.num_records)[0], **{**self.options, **options})

    def resumed(self, state: Any, num_batches: int | None, **options: Any) -> Iterator[tuple[Facts, str]]:
        """Yield what a new loader tells about its batches once it loaded a state."""
        with self.loader(**options) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            for batch in islice(loader, num_batches):
                yield told(batch)

    def state_after(self, num_batches: int) -> Any:
        """Return the state as of so many batches of the first pass."""
        return self.states[num_batches]

    def _note(self, batch: Any) -> tuple[Facts, str]:
        state = through_json(batch.state())
        sizes[len(json.dumps(state))] = self.name
        self.states.append(state)
        return told(batch)


def told(batch: Any) -> tuple[Facts, str]:
    """Return what a batch says, and the state as of it without the place that reading would begin at, which depends on the timing."""
    state = batch.state()
    return facts_of(batch), json.dumps({name: value for name, value in state.items() if name != "source"}, sort_keys=True)


def shape_of(state: Any) -> Any:
    """Return the keys of a state; the end of a pass and a cursor may be unknown before the first batch."""
    if isinstance(state, dict):
        return {key: shape_of(value) for key, value in sorted(state.items()) if key not in ("end_epoch", "cursor")}
    return "list" if isinstance(state, list) else "value"


def check(run: Run) -> None:
    """Check the whole conformance of a run."""
    for at in range(run.half + 1):
        assert list(run.resumed(run.state_after(at), run.half - at)) == run.told[at : run.half], f"resumed after {at} batches"
    rest = list(run.resumed(run.state_after(run.half), None))
    assert rest == run.told[run.half : run.num_batches], "the last half of an epoch"
    for at in (run.num_batches, run.num_batches + 1):  # of the last batch, and of the end: no pass is empty
        assert list(run.resumed(run.state_after(at), 2)) == run.told[run.num_batches :]
    assert {json.dumps(shape_of(state)) for state in run.states} == {json.dumps(shape_of(run.states[0]))}
    assert max(len(json.dumps(state)) for state in run.states) < MAX_STATE_BYTES


@pytest.mark.parametrize("batching", [name for name in BATCHINGS if name != "first fit"])  # which packs as best fit does
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_order_and_batching(source: str, order: str, batching: str) -> None:
    """Each with one collator in turn, so that every source and every batching meets all of those that take samples of any length."""
    turn = SOURCES.index(source) + list(ORDERS).index(order) + list(BATCHINGS).index(batching)
    collator = list(COLLATORS.values())[turn % 3]
    check(Run(f"{source}, {order}, {batching}", source, shuffle=ORDERS[order], batch=BATCHINGS[batching], collate=collator))


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("batching", BATCHINGS)
def test_every_batching_with_every_collator(batching: str, collator: str) -> None:
    if collator == "stack" and isinstance(BATCHINGS[batching], Pack):
        pytest.skip("rows are no samples of one shape")
    prepare = Prepare(STRETCH, is_random=True, length=4 if collator == "stack" else None)
    shuffle = ORDERS["shuffled"]
    check(
        Run(
            f"{batching}, {collator}",
            "shards",
            batch=BATCHINGS[batching],
            collate=COLLATORS[collator],
            preprocess=prepare,
            shuffle=shuffle,
            lanes=1,
        )
    )


@pytest.mark.parametrize("source", SOURCES)
def test_interrupted_again_and_again(source: str) -> None:
    batching = list(BATCHINGS)[SOURCES.index(source) % len(BATCHINGS)]
    run = Run("", source, shuffle=ORDERS["shuffled"], batch=BATCHINGS[batching])
    state, at = run.states[0], 0
    while at < run.half:
        with run.loader(buffer_size=1 + at) as loader:
            loader.load_state_dict(state)
            batches = iter(loader)
            part = [told(batch) for batch in islice(batches, 1 + at % 3)]
            assert part == run.told[at : at + len(part)]
            at += len(part)
            batches.close()
            state = through_json(loader.state_dict())


@pytest.mark.parametrize("source", SOURCES)
def test_one_lane_and_what_is_left_at_the_end_of_an_epoch(source: str) -> None:
    batching = ("fixed", "bucket", "best fit")[SOURCES.index(source) % 3]
    check(Run(f"{source}, {batching}, padded", source, batch=BATCHINGS[batching], lanes=1, end="pad", shuffle=ORDERS["shuffled"]))


def test_a_mixture_that_repeats_without_end() -> None:
    with Run("", "mixture", batch=FixedBatch(2)).loader() as loader:
        assert len(list(loader)) > 3
    options: Options = {"batch": BATCHINGS["greedy"], "shuffle": ORDERS["shuffled"], "preprocess": Prepare(STRETCH, is_random=True)}
    common: Options = {"collate": rows_as_arrays, "lanes": 2, "workers": 0}

    def make() -> Loader:
        return Loader(make_source("mixture without end", NUM_RECORDS)[0], **options, **common)

    with make() as loader:
        batches = list(islice(loader, 60))
    facts = [told(batch) for batch in batches]
    for at in range(0, 60, 7):
        with make() as loader:
            loader.load_state_dict(through_json(batches[at].state()))
            assert [told(batch) for batch in islice(loader, 59 - at)] == facts[at + 1 :]


@pytest.mark.parametrize(
    ("source", "batching", "options"),
    [
        ("shards", "fixed", HOSTS[0]),
        ("mixture with a ramp", "best fit", HOSTS[0]),
        ("mixture by tokens", "greedy", HOSTS[1]),
        ("bookmarked stream", "bucket", HOSTS[2]),
        ("async stream", "budget", HOSTS[3]),
    ],
)
def test_other_workers_hosts_and_buffers(source: str, batching: str, options: Options) -> None:
    run = Run("", source, shuffle=ORDERS["shuffled"], batch=BATCHINGS[batching])
    middle = run.half // 2
    with run.loader(**options) as loader:
        loader.load_state_dict(run.state_after(middle))
        batches = iter(loader)
        assert [told(batch) for batch in islice(batches, 3)] == run.told[middle : middle + 3]
        state = through_json(batches.state())
        batches.close()
        loader.load_state_dict(state)
        assert [told(batch) for batch in loader] == run.told[middle + 3 : run.num_batches]
    assert list(run.resumed(state, run.half - middle - 3)) == run.told[middle + 3 : run.half]


def thin(number: int) -> int | None:
    """Leave lane 0 of 2 a third of what lane 1 has."""
    return None if number % 2 == 0 and number > 2 else number


def test_a_lane_that_is_epochs_ahead_of_another_is_resumed() -> None:
    def make() -> Loader:
        return Loader(range(12), preprocess=thin, batch=FixedBatch(2), collate=collate, lanes=2, epochs=4, workers=0)

    with make() as loader:
        batches = list(loader)
    assert [batch.epoch for batch in batches] == [0, 0, 1, 0, 2, 0, 3, 1]
    for at in range(len(batches) - 1):
        with make() as loader:
            loader.load_state_dict(through_json(batches[at].state()))
            assert numbers(loader) == numbers(batches[at + 1 :]), f"resumed after {at + 1} batches"


@pytest.mark.parametrize("options", [{"workers": 0}, THREADS])
def test_a_source_that_fails_before_a_saved_buffer_is_read_again_is_named(options: Options) -> None:
    fails = False

    def lines() -> Iterator[Any]:
        if fails:
            raise OSError("gone")
        yield from documents(40)

    def make() -> Loader:
        return Loader(lines, preprocess=Prepare(), batch=BATCHINGS["bucket"], collate=rows_as_arrays, lanes=2, **options)

    with make() as loader:
        state = next(state for batch in loader if all((state := batch.state())["lanes"][lane]["batcher"]["buckets"] for lane in "01"))
    fails = True
    with make() as loader:
        loader.load_state_dict(state)
        with pytest.raises(SourceError, match="OSError: gone"):
            next(iter(loader))
        assert loader.state_dict() == state


def test_states_are_small() -> None:
    largest = max(sizes, default=0)
    print(f"largest state: {largest} bytes, of {sizes.get(largest)}")
    assert largest < MAX_STATE_BYTES
