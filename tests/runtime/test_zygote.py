"""The zygote, for real: what its children inherit, how their ends are reported, and that nobody outlives his owner."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from aioloader.errors import HostError
from aioloader.runtime.moving import dumps
from aioloader.runtime.spawn import ForkClient, ZygoteProcess, describe_exit
from tests.runtime.zygote_entries import StartsThread

ENTRIES = "tests.runtime.zygote_entries"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def zygote() -> Iterator[ZygoteProcess]:
    with ZygoteProcess() as process:
        yield process


@contextlib.asynccontextmanager
async def client_of(zygote: ZygoteProcess) -> AsyncIterator[ForkClient]:
    client = ForkClient(zygote.connect())
    running = anyio.create_task_group()
    await running.__aenter__()
    running.start_soon(client.run)
    try:
        yield client
    finally:
        running.cancel_scope.cancel()
        await running.__aexit__(None, None, None)
        client.close()


def read_all(reading: int, timeout_s: float = 10) -> bytes:
    """Read until the other end is closed."""
    data = bytearray()
    while select.select([reading], [], [], timeout_s)[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            return bytes(data)
        data += part
    raise TimeoutError(f"nothing came within {timeout_s} s after {bytes(data)!r}")


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        with contextlib.suppress(OSError):
            os.close(writing)


async def told(client: ForkClient, payload: bytes = b"", *, num_descriptors: int = 1) -> Any:
    with pipe() as (reading, writing):
        pid = await client.fork(f"{ENTRIES}:tell", "test-child", payload, [writing] * num_descriptors)
        os.close(writing)
        facts = pickle.loads(await anyio.to_thread.run_sync(read_all, reading))
    assert facts["pid"] == pid
    assert await client.exit_of(pid, 5) == 0
    return facts


def wait_for_end(pidfds: list[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0], "a process is still there"


@contextlib.contextmanager
def watched(pids: list[int]) -> Iterator[list[int]]:
    pidfds = [os.pidfd_open(pid) for pid in pids]
    try:
        yield pidfds
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


# What a child gets


async def test_a_child_gets_what_it_was_sent_and_nothing_else(zygote: ZygoteProcess) -> None:
    async with client_of(zygote) as other, client_of(zygote) as client:
        assert await client.prepare(dumps({"some": [1, 2]})) is None
        await other.fork(f"{ENTRIES}:wait", "other", b"", [])
        facts = await told(client, b"payload", num_descriptors=3)
    assert (facts["payload"], facts["prepared"], facts["num_descriptors"]) == (b"payload", {"some": [1, 2]}, 3)
    assert (facts["parent"], facts["name"], facts["threads"]) == (zygote.pid, "test-child", 1)
    assert facts["path"] == sys.path
    assert facts["main_file"] is None
    assert facts["stdin"] == "/dev/null"
    assert facts["environ"] == {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    others = {number: target for number, target in facts["held"].items() if number > 2 and number not in facts["descriptors"]}
    assert not others, "a child holds sockets of others: their ends would go unnoticed"


async def test_a_large_payload_and_what_was_prepared_before(zygote: ZygoteProcess) -> None:
    payload = bytes(range(256)) * 20_000
    async with client_of(zygote) as client:
        await client.prepare(dumps(payload[:1000] * 3000))
        facts = await told(client, payload)
        assert facts["payload"] == payload
        assert facts["prepared"] == payload[:1000] * 3000


async def test_what_cannot_be_prepared_is_told_and_changes_nothing(zygote: ZygoteProcess) -> None:
    async with client_of(zygote) as client:
        await client.prepare(dumps("before"))
        failure = await client.prepare(b"cno_such_module_of_ours\nname\n.")
        assert failure is not None
        assert "ModuleNotFoundError: No module named 'no_such_module_of_ours'" in failure
        assert (await told(client))["prepared"] == "before"


async def test_many_forks_at_once(zygote: ZygoteProcess) -> None:
    pids: list[int] = []
    async with client_of(zygote) as client:

        async def fork(code: int) -> None:
            pid = await client.fork(f"{ENTRIES}:leave", "many", str(code).encode(), [])
            pids.append(pid)
            assert await client.exit_of(pid, 10) == code

        async with anyio.create_task_group() as tasks:
            for code in range(20):
                tasks.start_soon(fork, code)
    assert len(set(pids)) == 20


async def test_a_caller_that_is_cancelled_does_not_shift_the_answers(zygote: ZygoteProcess) -> None:
    async with client_of(zygote) as client:
        await client.prepare(dumps("prepared"))
        for _ in range(5):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await client.prepare(dumps("cancelled"))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.fork, f"{ENTRIES}:finish", "abandoned", b"", [])
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
            assert await client.prepare(b"not a pickle") is not None
            assert (await told(client, b"mine"))["payload"] == b"mine"


# How it ends


@pytest.mark.parametrize(
    ("entry", "payload", "exitcode", "words"),
    [
        ("finish", b"", 0, "left with exit code 0"),
        ("leave", b"7", 7, "left with exit code 7"),
        ("leave", b"255", 255, "left with exit code 255"),
        ("fail", b"at work", 1, "left with exit code 1"),
        ("no_such_entry", b"", 1, "left with exit code 1"),
        ("kill_itself", b"9", -9, "was killed by SIGKILL"),
        ("kill_itself", b"11", -11, "was killed by SIGSEGV"),
        ("kill_itself", b"35", -35, "was killed by signal 35"),
    ],
)
async def test_exits_are_reported(
    zygote: ZygoteProcess, capfd: pytest.CaptureFixture[str], entry: str, payload: bytes, exitcode: int, words: str
) -> None:
    async with client_of(zygote) as client:
        pid = await client.fork(f"{ENTRIES}:{entry}", "exits", payload, [])
        assert await client.exit_of(pid, 5) == exitcode
        assert await client.exit_of(pid, 0) == exitcode
    assert describe_exit(exitcode) == words
    again = zygote.fork(f"{ENTRIES}:{entry}", "exits", payload, [])
    assert zygote.exit_of(again, 5) == exitcode


async def test_an_exit_that_does_not_come_is_not_known(zygote: ZygoteProcess) -> None:
    async with client_of(zygote) as client:
        pid = await client.fork(f"{ENTRIES}:wait", "waits", b"", [])
        assert await client.exit_of(pid, 0.01) is None
        assert await client.exit_of(1, 0.01) is None
    assert describe_exit(None) == "ended in a way that was not reported"


def test_exits_are_kept_until_somebody_asks(zygote: ZygoteProcess) -> None:
    pids = [zygote.fork(f"{ENTRIES}:leave", "order", str(code).encode(), []) for code in range(4)]
    assert [zygote.exit_of(pid, 5) for pid in reversed(pids)] == [3, 2, 1, 0]


async def test_kill(zygote: ZygoteProcess) -> None:
    async with client_of(zygote) as client:
        one = await client.fork(f"{ENTRIES}:wait", "one", b"", [])
        other = await client.fork(f"{ENTRIES}:wait", "other", b"", [])
        await client.kill(one)
        assert await client.exit_of(one, 5) == -signal.SIGKILL
        await client.kill(other, signal.SIGTERM)
        assert await client.exit_of(other, 5) == -signal.SIGTERM
        await client.kill(one)
        await client.kill(os.getpid())  # no child: never hit
        assert (await told(client))["parent"] == zygote.pid


async def test_ctrl_c_is_for_the_trainer(zygote: ZygoteProcess) -> None:
    async with client_of(zygote) as client:
        with pipe() as (reading, writing):
            pid = await client.fork(f"{ENTRIES}:wait", "interrupted", b"", [writing])
            assert await anyio.to_thread.run_sync(os.read, reading, 100) == b"waiting"
            os.kill(zygote.pid, signal.SIGINT)
            os.kill(pid, signal.SIGINT)
            await client.kill(pid, signal.SIGTERM)
            assert await client.exit_of(pid, 5) == -signal.SIGTERM
            assert (await told(client))["parent"] == zygote.pid


# Who outlives whom


async def test_a_client_that_goes_takes_its_children_along_and_no_others(zygote: ZygoteProcess) -> None:
    async with client_of(zygote) as stays:
        with contextlib.ExitStack() as watches:
            async with client_of(zygote) as goes:
                mine = [await goes.fork(f"{ENTRIES}:wait", "mine", b"", []) for _ in range(3)]
                other = await stays.fork(f"{ENTRIES}:wait", "other", b"", [])
                pidfds = watches.enter_context(watched(mine))  # afterwards they may be gone already
            await anyio.to_thread.run_sync(wait_for_end, pidfds, 2)
        assert await stays.exit_of(other, 0.05) is None
        await stays.kill(other)
        assert await stays.exit_of(other, 5) == -signal.SIGKILL


def test_a_client_that_speaks_nonsense_or_vanishes_in_mid_message_hurts_nobody(zygote: ZygoteProcess) -> None:
    for data in (b"", b"\2", b"\2\0\0\0\xff\0\0\0\0\0\0\0\0\0\0\0partial"):
        with zygote.connect() as sock:
            sock.sendall(data)
    assert zygote.exit_of(zygote.fork(f"{ENTRIES}:finish", "after", b"", []), 5) == 0


def test_closing_ends_everything_at_once() -> None:
    process = ZygoteProcess()
    pids = [process.fork(f"{ENTRIES}:wait", "closed", b"", []) for _ in range(3)]
    with watched([process.pid, *pids]) as pidfds:
        process.close()
        wait_for_end(pidfds, 0)
        process.close()


def test_a_forked_copy_of_the_owner_only_lets_go(zygote: ZygoteProcess) -> None:
    pid = os.fork()
    if pid == 0:
        zygote.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert zygote.exit_of(zygote.fork(f"{ENTRIES}:finish", "after", b"", []), 5) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_children_die_with_the_zygote_and_its_end_is_an_error(number: int) -> None:
    with ZygoteProcess() as process:
        async with client_of(process) as client:
            pids = [await client.fork(f"{ENTRIES}:wait", "orphan", b"", []) for _ in range(3)]
            with watched(pids) as pidfds:
                os.kill(process.pid, number)
                await anyio.to_thread.run_sync(wait_for_end, pidfds, 2)
            with pytest.raises(HostError, match="zygote: expected an answer, but it ended"):
                await client.fork(f"{ENTRIES}:finish", "late", b"", [])
            with pytest.raises(HostError, match="zygote: expected an answer, but it ended"):
                await client.prepare(dumps(1))
            await client.kill(pids[0])
            assert await client.exit_of(pids[0], 0.01) is None
            process._process.wait(5)
            with pytest.raises(HostError, match=rf"zygote \(pid \d+\): .* but it was killed by {signal.Signals(number).name}"):
                process.fork(f"{ENTRIES}:finish", "late", b"", [])
            assert process.exit_of(pids[0], 0.01) is None


async def test_who_waits_for_an_answer_hears_of_the_end() -> None:
    with ZygoteProcess() as process:
        async with client_of(process) as client:
            os.kill(process.pid, signal.SIGSTOP)
            failures: list[str] = []

            async def ask() -> None:
                try:
                    await client.prepare(dumps(1))
                except HostError as error:
                    failures.append(str(error))

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                os.kill(process.pid, signal.SIGKILL)
            assert len(failures) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
@pytest.mark.parametrize("threaded", [False, True])
def test_nothing_survives_the_trainer(number: int, threaded: bool) -> None:
    program = f"""
        import os, socket
        from aioloader.runtime.moving import dumps
        from aioloader.runtime.spawn import ZygoteProcess
        from aioloader.runtime.wire import Wire
        from aioloader.runtime import zygote as messages
        from tests.runtime.zygote_entries import StartsThread
        zygote = ZygoteProcess()
        client = Wire(zygote.connect())
        client.send(messages.PREPARE, b"", [dumps(StartsThread() if {threaded} else 1)])
        assert client.receive(10).kind == messages.PREPARED
        reading, writing = os.pipe()
        pids = [zygote.pid] + [zygote.fork("{ENTRIES}:wait", "orphan", b"", [writing]) for _ in range(2)]
        while len(os.read(reading, 7)) < 7: pass
        os.read(reading, 7)
        print(*pids, flush=True)
        os.read(reading, 1)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as trainer:
        assert trainer.stdout is not None
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert len(pids) == 3
        with watched(pids) as pidfds:
            trainer.send_signal(number)
            wait_for_end(pidfds, 2)
        assert trainer.wait(5) == -number


# Where loading starts threads


async def test_what_starts_threads_is_never_forked() -> None:
    with ZygoteProcess() as process:
        async with client_of(process) as client:
            assert await client.prepare(dumps(StartsThread())) is None
            facts = await told(client, b"payload", num_descriptors=2)
            assert (facts["prepared"], facts["threads"]) == ("made beside a thread", 2)
            assert (facts["payload"], facts["num_descriptors"], facts["parent"]) == (b"payload", 2, process.pid)
            assert (facts["name"], facts["path"], facts["main_file"]) == ("test-child", sys.path, None)
            assert facts["environ"]["OMP_NUM_THREADS"] == "1"
            others = {number: target for number, target in facts["held"].items() if number > 2 and number not in facts["descriptors"]}
            assert not others
            pid = await client.fork(f"{ENTRIES}:leave", "fresh", b"5", [])
            assert await client.exit_of(pid, 10) == 5
            waits = await client.fork(f"{ENTRIES}:wait", "fresh", b"", [])
            await client.kill(waits)
            assert await client.exit_of(waits, 10) == -signal.SIGKILL


async def test_a_fresh_interpreter_gets_large_payloads() -> None:
    payload = bytes(range(256)) * 10_000
    with ZygoteProcess() as process:
        async with client_of(process) as client:
            await client.prepare(dumps((StartsThread(), payload)))
            facts = await told(client, payload)
            assert facts["payload"] == payload
            assert facts["prepared"] == ("made beside a thread", payload)


async def test_what_is_preloaded_is_there_in_every_child(zygote: ZygoteProcess) -> None:
    with ZygoteProcess(["imaplib", "aioloader.errors"]) as process:
        async with client_of(process) as client:
            assert "imaplib" in (await told(client))["modules"]
    async with client_of(zygote) as client:
        assert "imaplib" not in (await told(client))["modules"]


def test_a_module_that_cannot_be_preloaded_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with ZygoteProcess(["aioloader.no_such_module"]) as process:
        process.begin_fork(f"{ENTRIES}:finish", "child", b"", [])
        with pytest.raises(HostError, match=r"zygote \(pid \d+\): expected it to run until the loader closes, but it .*see its output"):
            process.finish_fork()
    assert "No module named 'aioloader.no_such_module'" in capfd.readouterr().err


def test_a_fork_that_was_begun_is_finished_later(zygote: ZygoteProcess) -> None:
    zygote.begin_fork(f"{ENTRIES}:leave", "begun", b"7", [])
    zygote.connect().close()
    assert zygote.exit_of(zygote.finish_fork(), 5) == 7


def test_an_owner_with_threads_is_no_trouble(zygote: ZygoteProcess) -> None:
    """The zygote is a process of its own: what the trainer's threads hold is not inherited."""
    lock = threading.Lock()
    with lock:
        assert zygote.exit_of(zygote.fork(f"{ENTRIES}:finish", "child", b"", []), 5) == 0


def test_connections_hold_no_descriptors_after_they_are_closed(zygote: ZygoteProcess) -> None:
    def held() -> int:
        return len(list(Path(f"/proc/{zygote.pid}/fd").iterdir()))

    before = held()
    for _ in range(20):
        zygote.connect().close()
    socks: list[socket.socket] = [zygote.connect() for _ in range(3)]
    assert zygote.exit_of(zygote.fork(f"{ENTRIES}:finish", "settles", b"", []), 5) == 0
    assert held() <= before + 3
    for sock in socks:
        sock.close()
    assert zygote.exit_of(zygote.fork(f"{ENTRIES}:finish", "settles", b"", []), 5) == 0
    assert held() <= before + 3
