"""The agreement on the end, with ranks simulated in one thread: what they deliver, in how many rounds, and that nobody waits for ever."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.bridge.agreement import Agreement, Verdict
from aioloader.errors import SynchronizationError, UnevenEndError

FIRST = 5
"""The step that passes begin with."""


class SimulatedRank:
    """Does what `AgreedFeed` does: asks before each step, begins a round after a step or when it has news, waits for the result."""

    def __init__(self, policy: str, own_end: int, prefetch: int, leaves_at: int | None = None) -> None:
        self.agreement = Agreement(policy, FIRST)
        self.own_end = own_end
        self.prefetch = prefetch
        self.leaves_at = leaves_at
        self.made = FIRST
        self.step = FIRST
        self.said: list[list[int]] = []
        self.num_learnt = 0
        self.num_fillers = 0
        self.outcome: Any = None

    def make(self) -> None:
        """Have the engine make one more step, if it may."""
        self.made = min(self.made + 1, self.own_end, self.step + self.prefetch)

    def report(self) -> None:
        has_ended = self.made == self.own_end and self.made < self.step + self.prefetch
        self.agreement.report(min(self.made, self.own_end), self.own_end if has_ended or self.step >= self.own_end else None)

    def turn(self, results: list[list[int]]) -> None:
        """Go on by one move, if there is one."""
        if self.outcome is not None:
            return
        if len(self.said) > self.num_learnt:
            if len(results) > self.num_learnt:
                self.agreement.learn(results[self.num_learnt])
                self.num_learnt += 1
            return
        try:
            verdict = self.agreement.verdict(self.step)
        except (UnevenEndError, SynchronizationError) as error:
            self.outcome = error
            return
        if verdict is Verdict.END:
            self.outcome = "end"
        elif verdict is Verdict.DELIVER:
            self.deliver()
        else:
            self.report()
            if self.agreement.has_news:
                self.said.append(self.agreement.contribution())

    def deliver(self) -> None:
        if self.step >= self.own_end:
            self.num_fillers += 1
        elif self.made <= self.step:
            return  # known to come, and not there yet
        self.step += 1
        if self.step == self.leaves_at:
            self.outcome = "left"
        if self.agreement.is_open(self.step):
            self.report()
            self.said.append(self.agreement.contribution())


def simulate(ranks: list[SimulatedRank], choices: random.Random, max_moves: int = 20_000) -> list[list[int]]:
    """Let ranks and engines move in random order until all are done; return the results of all rounds."""
    results: list[list[int]] = []
    for _ in range(max_moves):
        if all(rank.outcome is not None for rank in ranks):
            return results
        rank = choices.choice(ranks)
        if choices.random() < 0.5:
            rank.make()
        else:
            rank.turn(results)
        while all(len(rank.said) > len(results) for rank in ranks):
            results.append([min(column) for column in zip(*(rank.said[len(results)] for rank in ranks), strict=True)])
    raise AssertionError(f"waits for ever: {[(rank.step, rank.own_end, rank.outcome, len(rank.said)) for rank in ranks]}")


ends = st.lists(st.integers(FIRST, FIRST + 12), min_size=1, max_size=5)


@given(ends, st.sampled_from(["drop", "pad", "error", "repeat"]), st.integers(1, 4), st.integers(0, 1 << 32))
def test_all_ranks_deliver_the_same_number_of_steps(ends: list[int], policy: str, prefetch: int, seed: int) -> None:
    ranks = [SimulatedRank(policy, end, prefetch) for end in ends]
    results = simulate(ranks, random.Random(seed))
    expected = max(ends) if policy == "pad" else min(ends)
    assert [rank.step for rank in ranks] == [expected] * len(ranks)
    if policy in ("error", "repeat") and min(ends) < max(ends):
        for rank in ranks:
            assert isinstance(rank.outcome, UnevenEndError)
            assert rank.outcome.smallest == min(ends)
            assert min(ends) < rank.outcome.largest <= max(ends)
        assert len({rank.outcome.largest for rank in ranks}) == 1
    else:
        assert {rank.outcome for rank in ranks} == {"end"}
    assert [rank.num_fillers for rank in ranks] == [max(0, expected - end) for end in ends]
    assert {len(rank.said) for rank in ranks} == {len(results)}, "a round that was begun is taken part in by all"
    assert len(results) <= 2 * (expected - FIRST) + 2


@given(ends, st.sampled_from(["drop", "pad"]), st.integers(1, 4), st.integers(1, 6), st.integers(0, 1 << 32))
def test_ranks_that_leave_after_the_same_step_have_begun_the_same_rounds(
    ends: list[int], policy: str, prefetch: int, num_steps: int, seed: int
) -> None:
    ranks = [SimulatedRank(policy, end, prefetch, leaves_at=FIRST + num_steps) for end in ends]
    simulate(ranks, random.Random(seed))
    assert len({len(rank.said) for rank in ranks}) == 1


def test_a_step_is_known_ahead_when_all_have_it() -> None:
    """With data that are always there, one round goes as many steps ahead as are prefetched."""
    agreement = Agreement("drop", 0)
    agreement.learn([0, 0, 3, 1 << 62, -4, 0, 1, 1 << 62])
    assert [agreement.verdict(step) for step in range(4)] == [Verdict.DELIVER] * 3 + [Verdict.UNKNOWN]
    agreement.report(3)
    assert not agreement.has_news
    agreement.report(4)
    assert agreement.has_news


def minimum(*agreements: Agreement) -> list[int]:
    return [min(column) for column in zip(*(agreement.contribution() for agreement in agreements), strict=True)]


def test_a_rank_that_fails_is_named_on_the_others() -> None:
    one, other = Agreement("drop", 0, rank=0), Agreement("drop", 0, rank=3)
    one.report(2)
    other.fail()
    one.learn(minimum(one, other))
    with pytest.raises(SynchronizationError, match="the loader of rank 3 failed") as caught:
        one.verdict(0)
    assert caught.value.missing == (3,)


def test_a_rank_whose_pass_the_others_have_left_is_told_and_they_wait_for_it() -> None:
    left, gone, begun = (Agreement("drop", 0, pass_number=number) for number in (1, 1, 2))
    for agreement in (left, begun):
        agreement.report(2)
    left.learn([min(numbers) for numbers in zip(left.contribution(), gone.departure(), strict=True)])
    with pytest.raises(SynchronizationError, match="got some that have begun pass 2"):
        left.verdict(0)
    left = Agreement("drop", 0, pass_number=1)
    left.report(2)
    result = minimum(left, begun)
    left.learn(result)
    with pytest.raises(SynchronizationError, match="go on with pass 1 of this loader, got some that have begun pass 2; begin and leave"):
        left.verdict(0)
    begun.learn(result)
    assert begun.verdict(0) is Verdict.UNKNOWN
    assert begun.has_news
    follows = Agreement("drop", 0, pass_number=2)
    follows.report(1)
    begun.learn(minimum(begun, follows))
    assert begun.verdict(0) is Verdict.DELIVER


def test_a_rank_without_any_micro_batch_cannot_make_fillers() -> None:
    one, other = Agreement("pad", 0), Agreement("pad", 0)
    one.report(2)
    other.report(0, 0, can_fill=False)
    result = minimum(one, other)
    for agreement in (one, other):
        agreement.learn(result)
        with pytest.raises(SynchronizationError, match="at least one micro-batch"):
            agreement.verdict(0)


def test_a_rank_without_any_micro_batch_is_no_harm_where_nobody_has_one() -> None:
    one, other = Agreement("pad", 0), Agreement("pad", 0)
    for agreement in (one, other):
        agreement.report(0, 0, can_fill=False)
    one.learn(minimum(one, other))
    assert one.verdict(0) is Verdict.END


def test_lanes_of_one_rank_that_end_unevenly_are_an_error_on_all() -> None:
    one, other = Agreement("error", 0), Agreement("error", 0)
    one.report(2, 2, largest=3)
    other.report(2, 2)
    other.learn(minimum(one, other))
    assert other.verdict(1) is Verdict.DELIVER
    with pytest.raises(UnevenEndError, match=r"before step 2 .* to step 3"):
        other.verdict(2)
