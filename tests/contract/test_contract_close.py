"""Close is prompt and complete, whatever way a loader ends: no process, thread or descriptor is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from aioloader import ClosedError, FixedBatch, Loader
from aioloader.testing import Resources, resources, wait_until_clean
from tests.contract.cases import (
    EVERY_HOST,
    INLINE,
    PROCESSES,
    ROOT,
    SIDECAR_THREADS,
    THREAD_HOST,
    THREADS,
    Options,
    collate,
    large,
    name_of,
    numbers,
    run_script,
    stack,
    wait_until_dead,
)

CLOSE_WITHIN_S = 2.0


def make(source: Any = None, **options: Any) -> Loader:
    return Loader(range(10_000) if source is None else source, batch=FixedBatch(2), collate=collate, **{"buffer_size": 64, **options})


@contextlib.contextmanager
def leaves_nothing() -> Iterator[None]:
    """Fail if something is left of what the block started, 2 s after it."""
    before = resources()
    yield
    started = time.monotonic()
    left = wait_until_clean(before, timeout_s=CLOSE_WITHIN_S)
    assert left == Resources(), f"{left} after {time.monotonic() - started:.1f} s"


def leave_by_break(loader: Loader) -> None:
    for _ in loader:
        break


def leave_by_exception(loader: Loader) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for batch in loader:
            _ = 1 // batch.step


def leave_by_del(loader: Loader) -> None:
    iterator = iter(loader)
    next(iterator)
    del iterator, loader


def leave_unused(loader: Loader) -> None:
    iter(loader)


def leave_by_close(loader: Loader) -> None:
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(ClosedError, match="expected an open loader"):
        next(iterator)


def leave_at_the_end(loader: Loader) -> None:
    assert len(list(loader)) == 5_000


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception, leave_by_del, leave_unused, leave_by_close])
@pytest.mark.parametrize("options", EVERY_HOST.values(), ids=EVERY_HOST)
def test_a_loop_that_is_left(options: Options, leave: Callable[[Loader], None]) -> None:
    """A pass that is left early ends what it started, also if the loader itself is neither closed nor dropped."""
    with leaves_nothing():
        loader = make(**options)
        leave(loader)
    del loader


@pytest.mark.parametrize("options", [THREADS, PROCESSES, THREAD_HOST, SIDECAR_THREADS], ids=name_of)
def test_loops_that_are_left_while_micro_batches_are_put_in_shared_memory(options: Options) -> None:
    """The engine may be at that when it is ended; several loops, since it seldom is."""
    with leaves_nothing():
        loader = Loader(range(400), preprocess=large, batch=FixedBatch(1), collate=stack, buffer_size=64, **options)
        for last_step in range(2, 8):
            for batch in loader:
                if batch.step == last_step:
                    break
        del batch
    del loader


def test_shared_memory_is_closed_after_the_last_task() -> None:
    """Here that is the one that closes the source."""
    found: list[str] = []

    async def endless() -> AsyncIterator[int]:
        try:
            for number in itertools.count():
                yield number
        finally:
            await asyncio.sleep(0.2)
            found.extend(target for _, target in resources().descriptors if "memfd:aioloader" in target)

    with leaves_nothing():
        loader = Loader(endless, preprocess=large, batch=FixedBatch(1), collate=stack, buffer_size=8, **THREADS)
        for batch in loader:
            if batch.step == 2:
                break
        del batch
    assert found
    del loader


@pytest.mark.parametrize("options", [THREADS, PROCESSES], ids=name_of)
def test_a_loader_that_is_dropped_after_a_whole_pass(options: Options) -> None:
    with leaves_nothing():
        loader = make(range(10), **options)
        assert len(list(loader)) == 5
        del loader
        gc.collect()


def test_a_finished_loop_keeps_no_loader_alive() -> None:
    """Neither needs the garbage collector: what the source holds goes with the last reference."""
    loader = make(range(10), **INLINE)
    assert len(list(loader)) == 5  # a first pass may import torch, whose frames stay for a while
    assert len([*loader]) == 5
    ends = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert ends() is None
    finally:
        gc.enable()


async def wait_for_the_second(loader: Loader) -> None:
    iterator = aiter(loader)
    await anext(iterator)
    await anext(iterator)


def second_never(number: int) -> int:
    if number >= 2:
        time.sleep(1.9)  # longer than the test waits, shorter than closing may take
    return number


@pytest.mark.parametrize("options", [THREADS, PROCESSES], ids=name_of)
async def test_a_task_that_is_cancelled(options: Options) -> None:
    with leaves_nothing():
        task = asyncio.ensure_future(wait_for_the_second(make(preprocess=second_never, **options)))
        await asyncio.sleep(1.2)
        assert not task.done() or task.exception() is None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("options", [INLINE, {**THREADS, "preprocess": second_never}], ids=name_of)
async def test_a_cancelled_wait_ends_the_pass_and_is_not_raised_again(options: Options) -> None:
    loader = make(**options)
    iterator = aiter(loader)
    await anext(iterator)
    state = loader.state_dict()
    task = asyncio.ensure_future(anext(iterator))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ClosedError, match="whose last wait ended by CancelledError; start a new loop"):
        await anext(iterator)
    assert loader.state_dict() == state, "a batch that nobody got is not delivered"
    loader.load_state_dict(state)
    assert numbers([await anext(aiter(loader))]) == [2, 3]


@pytest.mark.parametrize("options", [THREADS, PROCESSES], ids=name_of)
def test_a_cancelled_scope_under_trio(options: Options) -> None:
    async def main() -> None:
        with trio.move_on_after(1.2) as scope:
            await wait_for_the_second(make(preprocess=second_never, **options))
            await trio.sleep_forever()
        assert scope.cancelled_caught

    with leaves_nothing():
        trio.run(main)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("options", "times"), [({**THREADS, "workers": 1}, 50), ({**PROCESSES, "workers": 1}, 6)])
async def test_cancelling_while_everything_starts(options: Options, times: int) -> None:
    """K39."""
    chance = random.Random(7)
    for _ in range(times):
        async with make(**options) as loader:
            waiting = asyncio.ensure_future(anext(aiter(loader)))
            await asyncio.sleep(chance.uniform(0, 0.005 if options["host"] == "thread" else 0.6))
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            started = time.monotonic()
        assert time.monotonic() - started < 5


def test_closing_at_any_moment_of_the_start() -> None:
    chance = random.Random(3)
    for options, times, longest_s in ((THREADS, 30, 0.01), (THREAD_HOST, 6, 0.4), (PROCESSES, 6, 0.8)):
        with leaves_nothing():
            for _ in range(times):
                loader = make(**options)
                iterator = iter(loader)
                time.sleep(chance.uniform(0, longest_s))
                started = time.monotonic()
                loader.close()
                assert time.monotonic() - started < CLOSE_WITHIN_S
            del loader, iterator


@pytest.mark.parametrize("options", [THREAD_HOST, PROCESSES], ids=name_of)
def test_workers_in_an_endless_loop_do_not_hold_up_closing(options: Options) -> None:
    def endless(number: int) -> int:
        while number:
            pass
        return number

    with leaves_nothing():
        loader = Loader(range(100), preprocess=endless, batch=FixedBatch(1), collate=collate, **options)
        iterator = iter(loader)
        assert numbers([next(iterator)]) == [0]
        started = time.monotonic()
        loader.close()
        assert time.monotonic() - started < CLOSE_WITHIN_S
        del iterator


def sidecars() -> set[int]:
    return {pid for pid, name in resources().processes if name == "aioloader-engin"}  # the system keeps 15 characters


def test_a_sidecar_that_stands_still_does_not_hold_up_closing() -> None:
    """Its last numbers are those that were asked for before."""
    before = sidecars()
    with leaves_nothing():
        loader = make(**PROCESSES)
        for _ in loader:
            known = loader.stats()
            (sidecar,) = sidecars() - before
            os.kill(sidecar, signal.SIGSTOP)
            started = time.monotonic()
            break
        assert time.monotonic() - started < CLOSE_WITHIN_S
        assert loader.stats()["stages"] == known["stages"]
    del loader


def test_20_passes_keep_their_workers() -> None:
    """K37."""
    with leaves_nothing(), make(range(40), **{**PROCESSES, "workers": 4}) as loader:
        while len(loader.stats().get("worker_pids", [])) < 4:  # the first passes may be over before all have started
            list(loader)
        pids = set()
        for _ in range(20):
            assert len(list(loader)) == 20
            pids.add(tuple(loader.stats()["worker_pids"]))
        assert len(pids) == 1
        assert len(set(next(iter(pids)))) == 4


@contextlib.contextmanager
def at_most_open_files(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def num_open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize("options", [{**THREADS, "workers": 1}, {**PROCESSES, "workers": 1}], ids=name_of)
def test_1000_kept_batches_need_no_descriptors(options: Options) -> None:
    """K46: in shared memory, far above what the limit of open files would allow."""

    def large(number: int) -> Any:
        import numpy as np

        return np.full(10_000, number, np.int32)

    with (
        at_most_open_files(256),
        leaves_nothing(),
        Loader(range(1_000), preprocess=large, batch=FixedBatch(1), collate=collate, **options) as loader,
    ):
        kept = [batch["x"] for batch in loader]
        assert num_open_files(os.getpid()) < 200
        assert all(num_open_files(pid) < 200 for pid in loader.stats()["worker_pids"])
    assert len(kept) == 1_000
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(kept))


def test_many_blocks_that_wait_for_a_slow_trainer_need_no_descriptors() -> None:
    """Each block is a piece of shared memory of its own; half a thousand of them wait."""

    def large(number: int) -> Any:
        import numpy as np

        time.sleep(0.005)
        return np.full(20_000, number, np.int32)

    with (
        at_most_open_files(128),
        Loader(range(400), preprocess=large, batch=FixedBatch(1), collate=collate, buffer_size=500, **PROCESSES) as loader,
    ):
        iterator = iter(loader)
        first = next(iterator)
        while loader.stats()["stages"]["preprocess"]["count"] < 400:
            time.sleep(0.05)
        assert all(num_open_files(pid) < 40 for pid in loader.stats()["worker_pids"])
        assert [int(batch["x"][0, 0]) for batch in (first, *iterator)] == list(range(400))


PREAMBLE = """
    import asyncio, os, signal, sys, threading, time
    from aioloader import FixedBatch, Loader
    from tests.contract.cases import collate

    def make(source=range(10**9), **options):
        return Loader(source, batch=FixedBatch(2), collate=collate, **{"buffer_size": 64, **options})
"""


def program(text: str) -> str:
    return textwrap.dedent(PREAMBLE) + textwrap.dedent(text)


@contextlib.contextmanager
def started_program(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program in a process group of its own; it is killed if the block leaves it running."""
    command = [sys.executable, "-c", source, *arguments]
    main = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    with main:
        try:
            yield main
        finally:
            main.kill()


def descendants() -> set[int]:
    return {pid for pid, _ in resources().processes}


@pytest.mark.timeout(60)
def test_ctrl_c() -> None:
    """K43: the whole process group gets the signal, as from a terminal."""
    source = program("""
        with make(workers=4) as loader:
            for batch in loader:
                if batch.step == 5:
                    print("running", flush=True)
    """)
    before = descendants()
    with started_program(source) as main:
        assert main.stdout is not None
        assert main.stdout.readline() == "running\n"
        until = time.monotonic() + 10
        while len(started := descendants() - before) < 1 + 1 + 1 + 4 and time.monotonic() < until:
            time.sleep(0.05)  # the last worker may come when others have done the first batches
        assert len(started) == 1 + 1 + 1 + 4, "the program, the zygote, the sidecar, the workers"
        os.killpg(main.pid, signal.SIGINT)
        _, errors = main.communicate(timeout=10)
    assert main.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not wait_until_dead(started, CLOSE_WITHIN_S)


@pytest.mark.timeout(90)
def test_ctrl_c_at_any_moment_of_the_start() -> None:
    source = program("""
        import torch  # an import that is interrupted leaves torch broken

        from aioloader.testing import resources, wait_until_clean
        before = resources()
        caught = 0
        for after_ms in (0, 20, 50, 100, 150, 200, 250, 300, 400, 500, 700, 900):
            timer = threading.Timer(after_ms / 1000, os.killpg, (0, signal.SIGINT))
            try:
                timer.start()
                for batch in make(workers=2):
                    pass
            except KeyboardInterrupt:
                caught += 1
            finally:
                timer.join()
        print(caught, wait_until_clean(before))
    """)
    done = run_script(source, timeout_s=60, start_new_session=True)
    assert done.stderr == ""
    assert done.stdout == "12 nothing\n"


@pytest.mark.timeout(60)
def test_a_killed_trainer_takes_everything_along(tmp_path: Path) -> None:
    """Two loaders run; the workers of the second are in endless loops."""
    source = program("""
        marker = sys.argv[1]

        def endless(number):
            open(marker, "w").close()
            while True:
                pass

        def forever():
            yield 1
            time.sleep(10**6)

        first, second, third = iter(make(workers=2)), iter(make(preprocess=endless, workers=2)), iter(make(forever, workers=1))
        next(first)
        while not os.path.exists(marker):
            time.sleep(0.01)
        print("running", flush=True)
        time.sleep(60)
    """)
    before = descendants()
    with started_program(source, str(tmp_path / "endless")) as main:
        assert main.stdout is not None
        assert main.stdout.readline() == "running\n"
        started = descendants() - before
        assert len(started) >= 1 + 4 + 4 + 2
        main.kill()
    assert not wait_until_dead(started, CLOSE_WITHIN_S)


@pytest.mark.timeout(60)
def test_a_source_that_blocks_for_ever_does_not_hold_up_the_exit() -> None:
    """K41."""
    source = program("""
        def blocked():
            yield 1
            time.sleep(10**6)

        async def main(host):
            loader = make(blocked, host=host, pool="thread", workers=1)
            try:
                await asyncio.wait_for(anext(aiter(loader)), 0.2)
            except TimeoutError:
                print(f"cancelled {host}", flush=True)

        asyncio.run(main("process"))
        asyncio.run(main("thread"))
        print("returned", flush=True)
    """)
    with started_program(source) as main:
        assert main.stdout is not None
        assert [main.stdout.readline() for _ in range(3)] == ["cancelled process\n", "cancelled thread\n", "returned\n"]
        started = time.monotonic()
        _, errors = main.communicate(timeout=10)
        assert time.monotonic() - started < 5
    assert errors == ""
    assert main.returncode == 0


@pytest.mark.timeout(60)
def test_a_program_that_ends_in_the_middle() -> None:
    """Nothing is closed and nothing complains; the exit code is the program's own."""
    done = run_script(
        program("""
            kept = [iter(make(workers=2)), iter(make(workers=1, host="thread")), iter(make(workers=0))]
            print([next(iterator).step for iterator in kept], flush=True)
            sys.exit(3)
        """)
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "[0, 0, 0]\n", "")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_jobs_that_start_together_do_not_meet() -> None:
    """K45: six jobs, each of which starts fifteen loaders."""
    source = program("""
        first = int(sys.argv[1])
        for _ in range(15):
            with make(range(first, first + 40), preprocess=lambda number: number, workers=2) as loader:
                assert [n for batch in loader for n in batch["x"].tolist()] == list(range(first, first + 40))
        print("done")
    """)
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", source, str(1000 * job)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        for job in range(6)
    ]
    assert [job.communicate(timeout=280) for job in jobs] == [("done\n", "")] * 6
