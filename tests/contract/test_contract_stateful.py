"""Runs that are saved, killed, restored, resized and broken off at random deliver what a plain reference says."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from aioloader import Bucket, FixedBatch, Loader, Mesh, Pack, Shuffle, TokenBudget
from aioloader.state import merge
from tests.contract.cases import PROCESSES, SIDECAR_THREADS, THREAD_HOST, THREADS, Options
from tests.contract.order_cases import MIXTURES, PLAIN, Facts, Prepare, facts_expected, facts_of, make_source, rows_as_arrays, through_json
from tests.contract.reference import Reference

ENDLESS_LIMIT = 200
"""Records of an endless mixture that are compared."""

BATCHINGS: dict[str, Any] = {
    "fixed": FixedBatch(2),
    "fixed, one": FixedBatch(1),
    "budget": TokenBudget(24),
    "budget, unpadded": TokenBudget(20, padded=False, max_samples=3, overflow="drop"),
    "budget, alone": TokenBudget(9, multiple_of=4, overflow="alone"),
    "bucket": Bucket((4, 8, 16), batch_size=2),
    "bucket, early": Bucket((3, 6, 10), batch_size=(3, 2, 1), lookahead=4, max_age=5, overflow="alone"),
    "bucket, tokens": Bucket((4, 12), max_tokens=24, overflow="drop", lookahead=6, max_age=3),
    "greedy": Pack(16, rows=2),
    "greedy, short rows": Pack(3, rows=1),
    "greedy, cut": Pack(8, rows=1, overflow="truncate", separator=(7, 8)),
    "best fit": Pack(16, rows=2, strategy="best_fit", open_bins=3),
    "first fit": Pack(12, rows=1, strategy="first_fit", open_bins=2, max_age=4),
}


@dataclass(frozen=True)
class Case:
    """A run but for what must not matter."""

    source: str
    num_records: int
    shuffle: Shuffle | None
    batching: str
    num_lanes: int
    epochs: int
    seed: int
    stretch: tuple[int, int]

    @property
    def is_endless(self) -> bool:
        return self.source == "mixture without end"

    @property
    def prepare(self) -> Prepare:
        return Prepare(self.stretch)

    def loader(self, dp_rank: int, dp_size: int, options: Options) -> Loader:
        return Loader(
            make_source(self.source, self.num_records)[0],
            preprocess=self.prepare,
            batch=BATCHINGS[self.batching],
            collate=rows_as_arrays,
            shuffle=self.shuffle,
            seed=self.seed,
            lanes=self.num_lanes,
            mesh=Mesh(dp_rank=dp_rank, dp_size=dp_size),
            **{"epochs": self.epochs, **options},
        )


@lru_cache(maxsize=64)
def expected_lanes(case: Case, first: int, end: int) -> list[list[Facts]]:
    """Return what each lane delivers in a pass, counting steps from 0. What the reference leaves out is played, never interrupted."""
    if case.source == "mixture by tokens" or "fit" in case.batching:
        return [_played_lane(case, lane, first, end) for lane in range(case.num_lanes)]
    data = make_source(case.source, case.num_records)[1]
    limit = ENDLESS_LIMIT if case.is_endless else None
    reference = Reference(data, case.shuffle, case.seed, case.num_lanes, case.prepare, BATCHINGS[case.batching], limit)
    lanes = reference.lanes(first, end)
    return [[facts_expected(batch, step, lane) for step, batch in enumerate(batches)] for lane, batches in enumerate(lanes)]


def _played_lane(case: Case, lane: int, first: int, end: int) -> list[Facts]:
    played: list[Facts] = []
    for epoch in range(first, end):
        with case.loader(lane, case.num_lanes, {"workers": 0, "epochs": 1}) as loader:
            loader.set_epoch(epoch)
            played += [facts_of(batch) for batch in loader]
    return [(step, *facts[1:]) for step, facts in enumerate(played)]


@dataclass(frozen=True)
class Position:
    """Where a run stands: in the pass over epochs `first` to `end` - 1, that began at step `base`, after `done` micro-batches of all lanes.

    `origin` is the epoch in which the counts of the run began.
    """

    origin: int
    first: int
    end: int
    base: int = 0
    done: int = 0


SHUFFLES = st.one_of(
    st.none(),
    st.builds(Shuffle, window=st.integers(1, 70), shards_in_window=st.none() | st.integers(1, 5), seed=st.none() | st.integers(0, 3)),
)
CASES = st.builds(
    Case,
    source=st.sampled_from((*PLAIN, *MIXTURES, "mixture by tokens")),
    num_records=st.integers(12, 90),
    shuffle=SHUFFLES,
    batching=st.sampled_from(list(BATCHINGS)),
    num_lanes=st.sampled_from((1, 2, 3, 4, 6, 8, 12)),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 3),
    stretch=st.sampled_from(((0, 0), (5, 40), (20, 30))),
)
INLINE_OPTIONS = st.fixed_dictionaries({"workers": st.just(0), "buffer_size": st.sampled_from((None, 1, 2, 7, 64))})
HOST_OPTIONS = st.builds(
    lambda host, workers, buffer_size, prefetch: {**host, "workers": workers, "buffer_size": buffer_size, "prefetch_batches": prefetch},
    st.sampled_from((PROCESSES, THREADS, THREAD_HOST, SIDECAR_THREADS)),
    st.integers(1, 3),
    st.sampled_from((None, 1, 2, 7, 64)),
    st.integers(1, 5),
)


class Elastic(RuleBasedStateMachine):
    """A run on simulated ranks, played one after another."""

    options_of = INLINE_OPTIONS
    cases = CASES
    at: Position

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.case: Case = data.draw(self.cases)
        if self.case.is_endless:
            self.case = replace(
                self.case, epochs=1, batching=self.case.batching.replace("best fit", "greedy").replace("first fit", "fixed")
            )
        self.sizes = [size for size in range(1, self.case.num_lanes + 1) if self.case.num_lanes % size == 0]
        self.size = data.draw(st.sampled_from(self.sizes))
        self.options: Options = data.draw(self.options_of)
        self.loaders: list[Loader] = []
        self.iterators: list[Any] = []
        self.saved: tuple[Position, list[Any]] | None = None
        self.lane_states: dict[Position, str] = {}
        self._start_anew()

    # Rules

    @rule(num=st.integers(1, 15))
    def advance(self, num: int) -> None:
        """Every rank delivers so many micro-batches, which may end in the middle of a step."""
        self._begin_loop()
        target = min(self.at.done + num * self.size, self._total(self.at))
        for rank, batches in enumerate(self.iterators):
            expected = [self._expected(self.at, index) for index in range(self.at.done, target) if index % self.size == rank]
            assert [facts_of(batch) for batch in islice(batches, len(expected))] == expected
        self.at = replace(self.at, done=target)

    @precondition(lambda self: not self.case.is_endless)
    @rule()
    def finish(self) -> None:
        """Every rank goes on to the end of its pass, where one may have a step more than another without a process group."""
        self._begin_loop()
        for rank, batches in enumerate(self.iterators):
            own_total = self._total(self.at, range(rank, self.case.num_lanes, self.size))
            expected = [self._expected(self.at, index) for index in range(self.at.done, own_total) if index % self.size == rank]
            assert [facts_of(batch) for batch in batches] == expected
        self.iterators = []
        if self._is_even(self.at, self.size):
            self.at = self.start = self._next_pass(self.at)
        else:  # states of such ranks belong to different steps
            self._go_back(self.size, self.options)

    @rule(chosen=st.randoms(use_true_random=False))
    def save(self, chosen: random.Random) -> None:
        states = [through_json(loader.state_dict()) for loader in self.loaders]
        if self.iterators:
            assert states == [batches.state() for batches in self.iterators]
        chosen.shuffle(states)
        merged = through_json(merge(states))
        at = self.start if self.at.done == 0 else self.at  # a pass that has delivered nothing is saved as what it began with
        lanes = json.dumps(merged["lanes"], sort_keys=True)
        assert self.lane_states.setdefault(at, lanes) == lanes, "a state depends on the way there"
        self.saved = at, [merged] if chosen.random() < 0.5 else states

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """Go back to what was saved last, on as many ranks."""
        self._go_back(self.size, data.draw(self.options_of))

    @rule(data=st.data(), chosen=st.randoms(use_true_random=False))
    def resize(self, data: st.DataObject, chosen: random.Random) -> None:
        """Save, and go on at once on any number of ranks."""
        self.save(chosen)
        self._go_back(data.draw(st.sampled_from(self.sizes)), data.draw(self.options_of))

    @precondition(lambda self: self.iterators)
    @rule()
    def break_off(self) -> None:
        """A pass that was left begins again where it began; until then its last batch is what a state tells about."""
        self._leave()

    @precondition(lambda self: self.iterators)
    @rule()
    def break_off_and_load(self) -> None:
        """Go on in the same loaders."""
        if self.at.done and not self._is_even(self.at, self.size):
            return
        self._leave()
        for loader in self.loaders:
            loader.load_state_dict(through_json(loader.state_dict()))
        self.start = self.at = self.at if self.at.done else self.start

    @rule(epoch=st.none() | st.integers(20, 23))
    def set_epoch(self, epoch: int | None) -> None:
        """Leave the pass for the beginning of another epoch; for the one that the loader stands in, nothing happens."""
        if epoch is None and self.start.done == self._total(self.start):
            return  # it would be counted as done
        self._leave()
        for loader in self.loaders:
            loader.set_epoch(loader.epoch if epoch is None else epoch)
        if epoch is not None and epoch != self.start.first:
            self.at = self.start = Position(epoch, epoch, epoch + self.case.epochs)

    @invariant()
    def states_are_small(self) -> None:
        for loader in getattr(self, "loaders", ()):
            assert len(json.dumps(loader.state_dict())) < 3000 + self.case.num_lanes // self.size * 1000

    def teardown(self) -> None:
        for loader in getattr(self, "loaders", ()):
            loader.close()

    # The model

    def _total(self, at: Position, lanes: range | None = None) -> int:
        """Return the micro-batches of all lanes up to the last step that these lanes have."""
        everything = expected_lanes(self.case, at.first, at.end)
        return self.case.num_lanes * min(len(everything[lane]) for lane in lanes or range(self.case.num_lanes))

    def _expected(self, at: Position, index: int) -> Facts:
        step, lane = divmod(index, self.case.num_lanes)
        facts = expected_lanes(self.case, at.first, at.end)[lane][step]
        return (at.base + step, *facts[1:])

    def _is_even(self, at: Position, size: int) -> bool:
        """Return whether all of so many ranks have the same number of steps."""
        return all(self._total(at, range(rank, self.case.num_lanes, size)) == self._total(at) for rank in range(size))

    def _next_pass(self, at: Position) -> Position:
        return Position(at.origin, at.end, at.end + self.case.epochs, at.base + self._total(at) // self.case.num_lanes)

    # The run

    def _begin_loop(self) -> None:
        if self.iterators:
            return
        self.at = self.start
        if self.at.done and self.at.done == self._total(self.at) and not self.case.is_endless:
            self.at = self._next_pass(self.at)
        for epoch in range(self.at.first, self.at.end):  # a whole epoch without a micro-batch ends a run
            lanes = expected_lanes(self.case, self.at.first, self.at.end)
            assume(all(any(facts[2] == epoch for facts in lane) for lane in lanes))
        self.iterators = [iter(loader) for loader in self.loaders]

    def _leave(self) -> None:
        for batches in self.iterators:
            batches.close()
        self.iterators = []

    def _start_anew(self) -> None:
        self._replace(self.size, self.options)
        self.at = self.start = Position(0, 0, self.case.epochs)

    def _replace(self, size: int, options: Options) -> None:
        self._leave()
        for loader in self.loaders:
            loader.close()
        self.size, self.options = size, options
        self.loaders = [self.case.loader(rank, size, options) for rank in range(size)]

    def _go_back(self, size: int, options: Options) -> None:
        if self.saved is None:
            self._start_anew()
            return
        position, states = self.saved
        if position.done == self._total(position) and not self._is_even(position, size):
            size = 1
        if size != states[0]["dp_size"]:
            states = [merge(states)]
        self._replace(size, options)
        by_rank = {state["dp_rank"]: state for state in states}
        for rank, loader in enumerate(self.loaders):
            loader.load_state_dict(by_rank.get(rank, states[0]))
        self.at = self.start = position


class ElasticOnHosts(Elastic):
    """The same with real workers, hosts and queues."""

    options_of = st.one_of(HOST_OPTIONS, INLINE_OPTIONS)
    cases = CASES.map(lambda case: replace(case, num_lanes=min(case.num_lanes, 4)))


def run_machine(machine: type[Elastic], num_examples: int, num_steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_saved_killed_restored_and_resized_at_random() -> None:
    run_machine(Elastic, num_examples=12, num_steps=10)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_saved_killed_restored_and_resized_at_random_for_longer() -> None:
    run_machine(Elastic, num_examples=40, num_steps=15)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_on_workers_and_hosts_of_every_kind() -> None:
    run_machine(ElasticOnHosts, num_examples=20, num_steps=8)
