"""Signal: wakes all who wait, and only them."""

from __future__ import annotations

import anyio
from anyio import wait_all_tasks_blocked

from aioloader.runtime.signal import Signal


async def test_wakes_everybody_who_waits_and_remembers_nothing() -> None:
    signal = Signal()
    signal.notify()
    woken: list[int] = []

    async def wait(number: int) -> None:
        await signal.wait()
        woken.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, number)
        await wait_all_tasks_blocked()
        assert woken == []
        signal.notify()
        signal.notify()
        tasks.start_soon(wait, 3)
        await wait_all_tasks_blocked()
        assert sorted(woken) == [0, 1, 2]
        signal.notify()
    assert sorted(woken) == [0, 1, 2, 3]


async def test_no_change_is_missed_between_check_and_wait() -> None:
    signal = Signal()
    queue: list[int] = []
    seen: list[int] = []

    async def consume() -> None:
        while len(seen) < 200:
            while not queue:
                await signal.wait()
            seen.append(queue.pop(0))

    async def produce(first: int) -> None:
        for number in range(first, first + 100):
            queue.append(number)
            signal.notify()
            if number % 3:
                await anyio.lowlevel.checkpoint()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume)
            tasks.start_soon(produce, 0)
            tasks.start_soon(produce, 100)
    assert sorted(seen) == list(range(200))


async def test_a_cancelled_waiter_leaves_the_others_waiting() -> None:
    signal = Signal()
    woken: list[str] = []

    async def wait(name: str) -> None:
        await signal.wait()
        woken.append(name)

    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as others:
            others.start_soon(wait, "cancelled")
            tasks.start_soon(wait, "stays")
            await wait_all_tasks_blocked()
            others.cancel_scope.cancel()
        signal.notify()
    assert woken == ["stays"]
