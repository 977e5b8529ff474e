"""CallThread: one thread, calls in order, and no exception of theirs stops the loop or looks like a cancellation."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from typing import NoReturn

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from aioloader.runtime.threads import CallThread


async def test_calls_run_in_one_other_thread_and_return() -> None:
    thread = CallThread("test-calls")
    names = {await thread.call(threading.current_thread) for _ in range(5)}
    assert [name.name for name in names] == ["test-calls"]
    assert all(one.daemon for one in names)
    assert await thread.call(divmod, 7, 3) == (2, 1)
    assert await thread.call(dict[str, int]().get, "missing") is None
    thread.stop()
    assert thread.join(5)


async def test_calls_run_one_after_another_in_the_order_made() -> None:
    thread = CallThread("test-order")
    ran: list[int] = []
    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(thread.call, ran.append, number)
    assert ran == list(range(50))
    thread.stop()
    assert thread.join(5)


class Anything:
    """Something to refer to."""


async def test_what_a_call_was_given_is_not_kept_after_it() -> None:
    thread = CallThread("test-kept")
    given = Anything()
    reference = weakref.ref(given)
    await thread.call(id, given)
    del given
    assert await thread.call(reference) is None
    thread.stop()
    assert thread.join(5)


async def test_a_cancelled_caller_leaves_its_call_running() -> None:
    thread = CallThread("test-cancel")
    go: queue.SimpleQueue[str] = queue.SimpleQueue()
    got: list[str] = []

    def blocking() -> str:
        got.append(go.get())
        return got[-1]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(thread.call, blocking)
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    go.put("late")
    assert await thread.call(got.copy) == ["late"]
    thread.stop()
    assert thread.join(5)


def fail(error: BaseException) -> NoReturn:
    raise error


class Odd(BaseException):
    pass


async def test_exceptions_come_back_as_they_are() -> None:
    thread = CallThread("test-errors")
    error = LookupError("gone")
    with pytest.raises(LookupError, match="gone") as caught:
        await thread.call(fail, error)
    assert caught.value is error
    assert await thread.call(lambda: 1) == 1
    thread.stop()
    assert thread.join(5)


@pytest.mark.parametrize(
    "error", [StopIteration(3), asyncio.CancelledError(), SystemExit(2), KeyboardInterrupt(), GeneratorExit(), Odd("odd")], ids=repr
)
async def test_what_would_stop_the_loop_or_look_like_a_cancellation_is_wrapped(error: BaseException) -> None:
    thread = CallThread("test-wrapped")
    with pytest.raises(RuntimeError, match=f"{type(error).__name__}.* left a blocking call") as caught:
        await thread.call(fail, error)
    assert caught.value.__cause__ is error
    thread.stop()
    assert thread.join(5)


async def test_a_thread_that_blocks_is_left_behind() -> None:
    thread = CallThread("test-blocked")
    go = threading.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: thread.call(go.wait))
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    thread.stop()
    assert not thread.join(0.01)
    go.set()
    assert thread.join(5)


def test_a_call_that_outlives_its_loop_is_forgotten() -> None:
    thread = CallThread("test-outlives")
    go = threading.Event()

    async def abandon() -> None:
        with anyio.move_on_after(0):
            await thread.call(go.wait)

    asyncio.run(abandon())
    go.set()
    thread.stop()
    assert thread.join(5)


async def test_calls_after_stop_are_refused() -> None:
    thread = CallThread("test-stopped")
    thread.stop()
    with pytest.raises(RuntimeError, match="CallThread test-stopped: expected calls before stop"):
        await thread.call(int)
    assert thread.join(5)
