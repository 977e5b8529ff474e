"""The in-flight budget: nothing is counted twice, nothing is lost, nobody waits for a slot that is there."""

from __future__ import annotations

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioloader.runtime.budget import Budget, Slots


class SlotsMachine(RuleBasedStateMachine):
    """Moves records as an engine does, and remembers where each one is."""

    @initialize(limit=st.integers(1, 20), batch=st.integers(1, 30))
    def begin(self, limit: int, batch: int) -> None:
        self.slots = Slots(limit)
        self.batch = batch
        self.working = self.open = self.ready = 0
        self.sizes: set[float] = set()

    @precondition(lambda self: self.slots.free())
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        free = self.slots.free()
        assert free <= self.slots.limit
        taken = data.draw(st.integers(1, free))
        self.slots.start(taken)
        self.working += taken
        assert self.working <= self.slots.limit
        if self.slots.in_flight > self.slots.limit:  # a batch needs more records than the limit
            assert not self.ready
            assert self.open

    @precondition(lambda self: self.working)
    @rule(data=st.data(), filtered=st.booleans(), each_bytes=st.sampled_from([1.0, 3.0, 4e6]))
    def finish(self, data: st.DataObject, *, filtered: bool, each_bytes: float) -> None:
        count = data.draw(st.integers(1, self.working))
        if filtered:
            self.slots.drop(count)
        else:
            self.slots.hold(count, each_bytes)
            self.sizes.add(each_bytes)
        self.working -= count
        self.open += 0 if filtered else count

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.open))
        self.slots.hold(-count)
        self.open -= count
        self.working += count

    @precondition(lambda self: self.open >= self.batch)
    @rule()
    def complete(self) -> None:
        self.slots.complete(self.batch)
        self.open -= self.batch
        self.ready += self.batch

    @precondition(lambda self: self.open)
    @rule()
    def end_epoch(self) -> None:
        self.slots.discard(self.open)
        self.open = 0

    @precondition(lambda self: self.ready)
    @rule()
    def deliver(self) -> None:
        self.slots.deliver(self.batch)
        self.ready -= self.batch

    @invariant()
    def counts(self) -> None:
        assert (self.slots.working, self.slots.open, self.slots.ready) == (self.working, self.open, self.ready)
        self.slots.note_peak()
        assert self.slots.in_flight == self.working + self.open + self.ready <= self.slots.peak
        assert self.slots.free() >= 0

    @invariant()
    def open_records_take_what_such_records_do(self) -> None:
        if self.open:
            assert min(self.sizes) * 0.999 <= self.slots.open_bytes / self.open <= max(self.sizes) * 1.001
        else:
            assert self.slots.open_bytes == 0
            self.sizes.clear()

    @invariant()
    def always_goes_on(self) -> None:
        can_start = self.slots.free() > 0
        can_move = self.working or self.ready or self.open >= self.batch
        assert can_start or can_move


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=30, stateful_step_count=40)


async def taken_at_once(budget: Budget, max_records: int) -> int:
    with anyio.fail_after(5):
        return await budget.acquire(max_records)


async def test_takes_no_more_than_asked_and_no_more_than_free() -> None:
    budget = Budget(10)
    assert await taken_at_once(budget, 4) == 4
    assert await taken_at_once(budget, 100) == 6
    budget.note_peaks()
    assert budget.slots.in_flight == budget.slots.peak == 10


async def test_waits_until_a_batch_is_delivered() -> None:
    budget = Budget(4)
    await taken_at_once(budget, 4)
    budget.slots.hold(4)
    budget.slots.complete(4)
    taken: list[int] = []

    async def acquire() -> None:
        taken.append(await budget.acquire(2))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(acquire)
        await wait_all_tasks_blocked()
        budget.changed()
        await wait_all_tasks_blocked()
        assert not taken
        budget.slots.deliver(4)
        budget.changed()
    assert taken == [2]


async def test_a_batch_larger_than_the_limit_gets_its_records() -> None:
    budget = Budget(2)
    for _ in range(5):
        taken = await taken_at_once(budget, 100)
        assert 1 <= taken <= 2
        budget.slots.hold(taken)
    budget.slots.complete(budget.slots.open)
    with anyio.move_on_after(0.01) as scope:
        await budget.acquire(1)
    assert scope.cancelled_caught


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 64, 512])
@pytest.mark.parametrize("num_open", [0, 1, 60])
async def test_records_that_wait_for_others_leave_the_producer_running(limit: int, num_open: int) -> None:
    """However few slots are left, they can be taken when nothing else will ever give some back."""
    budget = Budget(limit)
    while budget.slots.open < num_open:
        taken = await taken_at_once(budget, min(512, num_open - budget.slots.open))
        budget.slots.hold(taken)
    assert await taken_at_once(budget, 512) >= 1


async def test_small_change_is_gathered_while_others_have_work() -> None:
    budget = Budget(64)
    await taken_at_once(budget, 64)
    budget.slots.hold(32)
    budget.slots.complete(32)
    taken: list[int] = []

    async def acquire() -> None:
        taken.append(await budget.acquire(512))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(acquire)
        for _ in range(15):
            budget.slots.deliver(1)
            budget.changed()
            await wait_all_tasks_blocked()
            assert not taken
        budget.slots.deliver(1)
        budget.changed()
    assert taken == [16]


async def test_a_limit_that_falls_meanwhile_asks_for_less() -> None:
    budget = Budget(800)
    await taken_at_once(budget, 800)
    taken: list[int] = []

    async def acquire() -> None:
        taken.append(await budget.acquire(512))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(acquire)
        await wait_all_tasks_blocked()
        budget.slots.limit = 80
        budget.slots.drop(740)
        budget.changed()
    assert taken == [20]


async def test_cancelling_takes_nothing() -> None:
    budget = Budget(1)
    await taken_at_once(budget, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(budget.acquire, 1)
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        budget.slots.drop(1)
        budget.changed()
    assert budget.slots.in_flight == 0
    assert await taken_at_once(budget, 1) == 1


# Bytes


class Engine:
    """Moves records of known sizes through a budget, and holds what they took."""

    def __init__(self, limit: int, limit_bytes: int, num_unmeasured: int = 4) -> None:
        self.held = 0
        self.budget = Budget(limit, limit_bytes, lambda: self.held, num_unmeasured=num_unmeasured)

    async def start(self, raw_bytes: int = 0) -> int:
        """Read as many records as may start now, none if the producer would have to wait."""
        number = 0
        with anyio.move_on_after(0):
            number = await self.budget.acquire(1000)
        if number:
            self.budget.hold_raw(sum(self.budget.note_read([raw_bytes] * number)))
        return number

    def finish(self, num_records: int, nbytes: int, raw_bytes: int = 0) -> None:
        self.held += num_records * nbytes
        self.budget.num_finished += num_records
        self.budget.hold_raw(-num_records * raw_bytes)
        self.budget.observe(num_records, num_records * raw_bytes, num_records * nbytes)

    def deliver(self, num_records: int, nbytes: int) -> None:
        self.budget.num_finished -= num_records
        self.budget.slots.hold(num_records)
        self.budget.slots.complete(num_records)
        self.budget.slots.deliver(num_records)
        self.held -= num_records * nbytes


async def test_few_records_start_before_their_size_is_known() -> None:
    engine = Engine(1000, 1 << 30)
    assert await engine.start() == 4
    engine.finish(4, 100)
    assert await engine.start() == 1000 - 4


async def test_each_worker_gets_one_before_their_size_is_known_also_where_the_source_gives_them_one_by_one() -> None:
    engine = Engine(8, 1 << 30, num_unmeasured=2)
    engine.budget.slots.start(1)
    assert await engine.start() == 1
    assert await engine.start() == 0
    engine.finish(1, 100)
    assert await engine.start() == 6


async def test_records_start_only_while_they_fit_with_what_they_will_become() -> None:
    engine = Engine(1000, 1000)
    assert await engine.start(raw_bytes=10) == 4
    engine.finish(4, 50, raw_bytes=10)
    assert engine.budget.in_flight_bytes == 4 * 50
    started = await engine.start(raw_bytes=10)
    assert started == (1000 - 4 * 50) // 60
    assert engine.budget.in_flight_bytes == 4 * 50 + started * 10
    engine.budget.headroom_bytes = 400
    engine.deliver(4, 50)
    assert await engine.start() == 0
    engine.budget.headroom_bytes = 0
    engine.finish(9, 50, raw_bytes=10)
    engine.deliver(9, 50)
    assert await engine.start() == (1000 - (started - 9) * 60) // 60


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=40), limit=st.integers(1, 2000))
def test_bytes_stay_within_the_limit_for_records_of_one_size_and_all_get_through(sizes: list[int], limit: int) -> None:
    async def check() -> None:
        for nbytes in set(sizes):
            engine = Engine(100, limit)
            for _ in range(30):
                started = await engine.start()
                assert started, "nothing is in flight, and yet nothing may start"
                engine.finish(started, nbytes)
                if engine.budget.peak_bytes > max(limit, nbytes):
                    assert started == 4  # the first ones, whose size nobody could know
                    engine.budget.peak_bytes = 0
                engine.deliver(started, nbytes)

    anyio.run(check)


async def test_records_that_grow_stop_the_reading_at_once() -> None:
    engine = Engine(1000, 1000)
    assert await engine.start(raw_bytes=1) == 4
    engine.finish(4, 1, raw_bytes=1)
    engine.deliver(4, 1)
    engine.budget.slots.start(2)
    engine.budget.hold_raw(sum(engine.budget.note_read([400, 400])))
    assert engine.budget.in_flight_bytes == 800
    assert await engine.start() == 0


async def test_records_that_hide_their_size_are_counted_as_what_they_took_on_their_way() -> None:
    budget = Budget(1000, 1 << 30)
    seeming, real = 64, 1 << 20
    assert list(budget.note_read([seeming])) == [seeming]
    budget.observe_raw(1, real, seeming)
    budget.observe_raw(3, 3 * real, 3 * seeming)
    assert list(budget.note_read([seeming, real])) == [real, 2 * real - seeming], "others hide no more than that"
    for _ in range(300):
        budget.observe_raw(1, seeming, seeming)
    assert list(budget.note_read([seeming])) == [seeming]


def admitted(engine: Engine, num_wanted: int, *, is_next: bool = False, is_placed: bool = False) -> int:
    return engine.budget.num_admitted(num_wanted, is_next=is_next, is_placed=is_placed)


async def test_what_was_read_goes_to_a_worker_only_while_its_results_fit() -> None:
    """Those read before it was known how large they become, too."""
    engine = Engine(1000, 1000)
    engine.budget.slots.start(100)
    assert admitted(engine, 64) == 64
    engine.finish(4, 50)
    assert admitted(engine, 16) == 16
    assert admitted(engine, 17) == 0
    engine.budget.begin(16 * 50)
    assert admitted(engine, 1) == 0
    assert admitted(engine, 64, is_placed=True) == 64
    engine.budget.finish(16 * 50)
    assert admitted(engine, 16) == 16


async def test_the_record_whose_turn_it_is_goes_also_where_nothing_fits() -> None:
    engine = Engine(1000, 1000)
    engine.budget.slots.start(100)
    engine.finish(10, 95)
    assert admitted(engine, 5) == 0
    assert admitted(engine, 5, is_next=True) == 1
    engine.budget.slots.ready += 1
    assert admitted(engine, 5, is_next=True) == 0, "the trainer makes room"
    engine.budget.slots.ready -= 1
    engine.held = 5000
    assert admitted(engine, 5, is_next=True) == 1
    assert admitted(engine, 5, is_placed=True) == 0


async def test_who_was_not_admitted_is_told_of_room() -> None:
    engine, told = Engine(1000, 1000), []
    engine.budget.on_room = lambda: told.append(engine.held)
    engine.budget.slots.start(100)
    engine.finish(10, 95)
    engine.budget.changed()
    assert not told
    assert admitted(engine, 2) == 0
    engine.held = 800
    engine.budget.changed()
    assert told == [800]
    assert admitted(engine, 2) == 2
    engine.budget.changed()
    assert told == [800]


async def test_a_record_above_the_limit_passes_alone() -> None:
    engine = Engine(100, 10)
    engine.budget.observe(1, 0, 1000)
    assert await engine.start() == 1
    assert await engine.start() == 0
    engine.finish(1, 1000)
    assert await engine.start() == 0
    engine.deliver(1, 1000)
    assert await engine.start() == 1
    assert engine.budget.peak_bytes == 1000


def test_what_comes_back_from_elsewhere_finds_room_within_the_limit() -> None:
    slots = Slots(24)
    slots.start(20)
    slots.hold(20)
    slots.put_aside(3)
    slots.put_aside(2)
    assert (slots.in_flight, slots.reserved, slots.free()) == (15, 3, 6)
    slots.start(slots.free())
    assert (slots.in_flight, slots.free()) == (21, 0)
    assert slots.has_room_for(3)
    slots.bring_back(3)
    assert (slots.in_flight, slots.ready) == (24, 3)
    assert not slots.has_room_for(2)
    slots.deliver(3)
    assert slots.has_room_for(2)


def test_small_records_that_are_open_count_as_small_once_others_are_large() -> None:
    slots = Slots(1000)
    slots.start(600)
    slots.hold(500, 32.0)
    slots.complete(498)
    assert slots.open_bytes == pytest.approx(2 * 32)
    slots.hold(1, 4e6)
    slots.complete(3)
    assert (slots.open, slots.open_bytes) == (0, 0)


def test_a_micro_batch_larger_than_the_limit_reserves_no_more_than_half_of_it() -> None:
    slots = Slots(8)
    slots.start(12)
    slots.hold(12)
    slots.put_aside(12)
    assert (slots.in_flight, slots.free()) == (0, 4)
