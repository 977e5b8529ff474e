"""Wire: whatever the kernel cuts a stream into, frames and their descriptors arrive whole, in order and once."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.runtime.wire import Frame, Wire, WireClosedError

KIB = 1 << 10
SIZES = [0, 1, 15, 16, 17, 4095, 4096, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 128 * KIB - 16, 128 * KIB, 256 * KIB, 256 * KIB + 1, 700 * KIB]
"""Around the sizes at which something changes: header, joined header and meta, half of the buffer, the buffer."""
TINY_BUFFER_BYTES = 1  # the kernel rounds it up to about 4 KiB


class Message(NamedTuple):
    """What a frame is made of, by size."""

    kind: int
    meta: bytes
    body: list[bytes]
    num_descriptors: int


@contextlib.contextmanager
def wires(*, tiny: bool = False) -> Iterator[tuple[Wire, Wire]]:
    ours, theirs = socket.socketpair()
    if tiny:
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, TINY_BUFFER_BYTES)
    one, other = Wire(ours), Wire(theirs)
    try:
        yield one, other
    finally:
        one.close()
        other.close()


def filled(size: int, salt: int = 0) -> bytes:
    return (bytes(range(salt % 251, 251)) * (size // 100 + 3))[:size] if size else b""


@contextlib.contextmanager
def files(count: int) -> Iterator[list[int]]:
    numbers = [os.memfd_create(f"file {number}") for number in range(count)]
    try:
        yield numbers
    finally:
        for number in numbers:
            os.close(number)


def identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def check(frame: Frame | None, message: Message, sent: Sequence[int] = ()) -> None:
    assert frame is not None
    assert (frame.kind, bytes(frame.meta), bytes(frame.body)) == (message.kind, message.meta, b"".join(message.body))
    assert len(frame.descriptors) == message.num_descriptors
    try:
        assert [identity(number) for number in frame.descriptors] == [identity(number) for number in sent[: message.num_descriptors]]
        assert not any(os.get_inheritable(number) for number in frame.descriptors)
    finally:
        for number in frame.descriptors:
            os.close(number)


messages = st.builds(
    Message,
    kind=st.integers(0, 255),
    meta=st.sampled_from(SIZES).map(filled),
    body=st.lists(st.sampled_from(SIZES).map(lambda size: filled(size, 7)), max_size=3),
    num_descriptors=st.sampled_from([0, 0, 1, 2, 16]),
)


@pytest.mark.parametrize("tiny", [False, True])
@settings(max_examples=25)
@given(sent=st.lists(messages, min_size=1, max_size=6))
def test_frames_arrive_whole_and_in_order(tiny: bool, sent: list[Message]) -> None:
    with wires(tiny=tiny) as (one, other), files(16) as numbers, ThreadPoolExecutor(1) as executor:

        def send() -> None:
            for message in sent:
                one.send(message.kind, message.meta, message.body, numbers[: message.num_descriptors])

        sending = executor.submit(send)
        for message in sent:
            check(other.receive(10), message, numbers)
        sending.result(10)
        assert other.try_receive() is None


@settings(max_examples=40)
@given(sent=st.lists(messages.map(lambda message: message._replace(num_descriptors=0)), min_size=1, max_size=4), data=st.data())
def test_any_cut_of_the_stream_gives_the_same_frames(sent: list[Message], data: st.DataObject) -> None:
    stream = b"".join(encoded(message) for message in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12).map(sorted))
    raw, theirs = socket.socketpair()
    wire = Wire(theirs)
    frames: list[Frame] = []
    try:
        raw.setblocking(False)
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            part = memoryview(stream)[start:stop]
            while part:
                with contextlib.suppress(BlockingIOError):
                    part = part[raw.send(part) :]
                while (frame := wire.try_receive()) is not None:
                    frames.append(frame)
    finally:
        raw.close()
        wire.close()
    assert len(frames) == len(sent)
    for frame, message in zip(frames, sent, strict=True):
        check(frame, message)


def encoded(message: Message) -> bytes:
    """Return the bytes that a wire writes for a message."""
    ours, raw = socket.socketpair()
    wire = Wire(ours)
    with raw, ThreadPoolExecutor(1) as executor:
        sending = executor.submit(wire.send, message.kind, message.meta, message.body)
        size = 16 + len(message.meta) + sum(map(len, message.body))
        received = bytearray()
        while len(received) < size:
            received += raw.recv(1 << 20)
        sending.result(10)
        wire.close()
        assert raw.recv(1) == b""
    return bytes(received)


def test_one_byte_at_a_time() -> None:
    message = Message(3, b"meta", [b"body", b"", b"more"], 0)
    raw, theirs = socket.socketpair()
    wire = Wire(theirs)
    stream = encoded(message)
    with raw:
        for number, value in enumerate(stream):
            raw.send(bytes([value]))
            frame = wire.try_receive()
            assert (frame is None) == (number + 1 < len(stream))
        check(frame, message)
        wire.close()


def test_several_megabytes_through_a_tiny_buffer() -> None:
    message = Message(9, b"m" * 100, [filled(3 << 20), filled(1), filled(2 << 20, 3)], 2)
    with wires(tiny=True) as (one, other), files(2) as numbers, ThreadPoolExecutor(1) as executor:
        sending = executor.submit(one.send, message.kind, message.meta, message.body, numbers)
        check(other.receive(10), message, numbers)
        sending.result(10)


def test_more_parts_than_the_kernel_takes_at_once() -> None:
    parts = [bytes([number % 256]) for number in range(5000)]
    with wires() as (one, other), ThreadPoolExecutor(1) as executor:
        sending = executor.submit(one.send, 1, b"", parts)
        check(other.receive(10), Message(1, b"", parts, 0))
        sending.result(10)


def test_parts_of_other_item_sizes_are_counted_in_bytes() -> None:
    with wires() as (one, other):
        one.send(1, memoryview(b"meta"), [memoryview(bytearray(8)).cast("i"), bytearray(b"x")])
        check(other.receive(1), Message(1, b"meta", [bytes(8), b"x"], 0))


def test_more_descriptors_than_a_message_holds_are_refused_before_anything_is_sent() -> None:
    with wires() as (one, other), files(17) as numbers:
        with pytest.raises(ValueError, match=r"Wire.send: expected at most 16 descriptors, got 17"):
            one.send(1, b"", descriptors=numbers)
        assert other.try_receive() is None


def test_descriptors_stay_with_their_frames() -> None:
    with wires() as (one, other), files(6) as numbers:
        one.send(1, b"a", descriptors=numbers[:1])
        one.send(2, b"b")
        one.send(3, b"", [filled(200 * KIB)][:0], descriptors=numbers[1:6])
        check(other.receive(1), Message(1, b"a", [], 1), numbers)
        check(other.receive(1), Message(2, b"b", [], 0))
        check(other.receive(1), Message(3, b"", [], 5), numbers[1:])


def test_received_memory_belongs_to_the_frame() -> None:
    with wires() as (one, other):
        one.send(1, b"meta", [b"first"])
        frame = other.receive(1)
        one.send(2, b"META", [b"other"])
        assert other.receive(1) is not None
        assert frame is not None
        assert (bytes(frame.meta), bytes(frame.body)) == (b"meta", b"first")
        frame.body[0] = ord("F")
        assert bytes(frame.body) == b"First"


# The end of the other side


@pytest.mark.parametrize("part", [0, 1, 15, 16, 18, 20, 50, 200_000])
def test_a_peer_that_ends_in_mid_frame_is_gone(part: int) -> None:
    stream = encoded(Message(1, b"meta", [filled(300 * KIB)], 0))
    raw, theirs = socket.socketpair()
    wire = Wire(theirs)
    with raw, ThreadPoolExecutor(1) as executor:
        sending = executor.submit(raw.sendall, stream[:part])
        sending.add_done_callback(lambda _: raw.close())
        with pytest.raises(WireClosedError, match="the other end closed"):
            wire.receive(10)
        sending.result(10)
        with pytest.raises(WireClosedError, match="the other end closed"):
            wire.try_receive()
    wire.close()


def test_whole_frames_come_before_the_end() -> None:
    with wires() as (one, other):
        other.send(9, b"never read")  # the kernel reports this as a connection reset
        one.send(1, b"a")
        one.send(2, b"b", [filled(60 * KIB)])
        one.close()
        check(other.receive(1), Message(1, b"a", [], 0))
        check(other.receive(1), Message(2, b"b", [filled(60 * KIB)], 0))
        with pytest.raises(WireClosedError, match=r"the other end closed|reset"):
            other.receive(1)


def test_descriptors_of_a_frame_that_never_became_whole_are_closed() -> None:
    with files(3) as numbers:
        raw, theirs = socket.socketpair()
        wire = Wire(theirs)
        with raw:
            socket.send_fds(raw, [encoded(Message(1, b"meta", [b"body"], 0))[:10]], numbers)
            assert wire.try_receive() is None
        open_before = len(list(Path("/proc/self/fd").iterdir()))
        wire.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == open_before - 4


def test_sending_to_a_peer_that_is_gone() -> None:
    with wires() as (one, other):
        other.close()
        with pytest.raises(WireClosedError, match="Broken pipe"):
            one.send(1, b"a")


def test_a_blocked_sender_hears_that_its_peer_is_gone() -> None:
    with wires(tiny=True) as (one, other), ThreadPoolExecutor(1) as executor:
        sending = executor.submit(one.send, 1, b"", [filled(1 << 20)])
        assert select.select([other], [], [], 10)[0]  # it has begun, and the buffer takes a fraction of it
        other.close()
        with pytest.raises(WireClosedError, match=r"Broken pipe|reset"):
            sending.result(10)


def test_close_twice_and_use_afterwards() -> None:
    with wires() as (one, _other):
        assert one.fileno() >= 0
        one.close()
        one.close()
        assert one.fileno() == -1
        with pytest.raises(WireClosedError, match="Bad file descriptor"):
            one.send(1)
        with pytest.raises(WireClosedError, match="Bad file descriptor"):
            one.try_receive()


@pytest.mark.parametrize("timeout_s", [0, 0.01])
def test_a_timeout_keeps_the_part_that_came(timeout_s: float) -> None:
    message = Message(1, b"meta", [b"body"], 0)
    stream = encoded(message)
    raw, theirs = socket.socketpair()
    wire = Wire(theirs)
    with raw:
        raw.send(stream[:7])
        assert wire.receive(timeout_s) is None
        raw.send(stream[7:])
        check(wire.receive(timeout_s), message)
    wire.close()


# In an event loop


async def test_async_ends_exchange_frames_both_ways_at_once() -> None:
    sent = [Message(number, filled(size), [filled(size, 3)], number % 3) for number, size in enumerate(SIZES)]
    with wires(tiny=True) as (one, other), files(2) as numbers:

        async def send(wire: Wire) -> None:
            for message in sent:
                await wire.send_async(message.kind, message.meta, message.body, numbers[: message.num_descriptors])

        async def receive(wire: Wire) -> None:
            for message in sent:
                check(await wire.receive_async(), message, numbers)

        async with anyio.create_task_group() as tasks:
            for wire in (one, other):
                tasks.start_soon(send, wire)
                tasks.start_soon(receive, wire)


async def test_senders_take_turns_and_never_mix_their_frames() -> None:
    with wires(tiny=True) as (one, other):

        async def send(kind: int) -> None:
            for size in (0, 1, 30 * KIB):
                await one.send_async(kind, filled(size, kind))

        async with anyio.create_task_group() as tasks:
            for kind in range(8):
                tasks.start_soon(send, kind)
            seen: dict[int, list[bytes]] = {}
            for _ in range(24):
                frame = await other.receive_async()
                seen.setdefault(frame.kind, []).append(bytes(frame.meta))
        assert seen == {kind: [filled(size, kind) for size in (0, 1, 30 * KIB)] for kind in range(8)}


async def test_a_cancelled_receiver_loses_nothing() -> None:
    message = Message(1, b"meta", [filled(400 * KIB)], 1)
    with wires(tiny=True) as (one, other), files(1) as numbers:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.send_async, message.kind, message.meta, message.body, numbers)
            tasks.start_soon(one.send_async, 2, b"next")
            frame, num_cancelled = None, 0
            while frame is None:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    frame = await other.receive_async()
                num_cancelled += scope.cancelled_caught
                await checkpoint()
            assert num_cancelled > 10
            check(frame, message, numbers)
            check(await other.receive_async(), Message(2, b"next", [], 0))


async def test_a_sender_cancelled_before_its_first_byte_sends_nothing() -> None:
    with wires(tiny=True) as (one, other), files(1) as numbers:
        num_queued = 0
        one._sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # fill the kernel's buffer to the brim with whole frames
                one._sock.sendall(encoded_empty)
                num_queued += 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.send_async, 5, b"", [b"x" * KIB], numbers)
            await wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        for _ in range(num_queued):
            check(await other.receive_async(), Message(0, b"", [], 0))
        await one.send_async(6, b"after")
        check(await other.receive_async(), Message(6, b"after", [], 0))


encoded_empty = encoded(Message(0, b"", [], 0))


async def test_a_sender_cancelled_in_mid_frame_finishes_it() -> None:
    message = Message(1, b"meta", [filled(1 << 20)], 1)
    with wires(tiny=True) as (one, other), files(1) as numbers:
        scope = anyio.CancelScope()

        async def send() -> None:
            with scope:
                await one.send_async(message.kind, message.meta, message.body, numbers)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            check(await other.receive_async(), message, numbers)
        await one.send_async(2, b"after")
        check(await other.receive_async(), Message(2, b"after", [], 0))


async def test_a_sender_waiting_for_its_turn_can_be_cancelled() -> None:
    with wires(tiny=True) as (one, other):
        scope = anyio.CancelScope()

        async def second() -> None:
            with scope:
                await one.send_async(2, b"second")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.send_async, 1, b"", [filled(1 << 20)])
            await wait_all_tasks_blocked()
            tasks.start_soon(second)
            await wait_all_tasks_blocked()
            scope.cancel()
            check(await other.receive_async(), Message(1, b"", [filled(1 << 20)], 0))
        await one.send_async(3, b"third")
        check(await other.receive_async(), Message(3, b"third", [], 0))


async def test_waiting_ends_hear_that_the_other_is_gone() -> None:
    with wires(tiny=True) as (one, other):
        failures: list[str] = []

        async def expect_failure(kind: str) -> None:
            try:
                await (one.receive_async() if kind == "receive" else one.send_async(1, b"", [filled(1 << 20)]))
            except WireClosedError:
                failures.append(kind)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect_failure, "receive")
            tasks.start_soon(expect_failure, "send")
            await wait_all_tasks_blocked()
            other.close()
        assert sorted(failures) == ["receive", "send"]


async def test_closing_wakes_whoever_waits_for_this_end_even_in_mid_frame() -> None:
    """Two event loops would wait for ever on what is closed, and one of them ends the process."""
    with wires(tiny=True) as (one, _other):
        failures: list[str] = []

        async def expect_failure(kind: str) -> None:
            try:
                await (one.receive_async() if kind == "receive" else one.send_async(1, b"", [filled(1 << 20)]))
            except WireClosedError as error:
                failures.append(str(error))

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                for kind in ("receive", "send", "send"):
                    tasks.start_soon(expect_failure, kind)
                await wait_all_tasks_blocked()
                one.close()
                await checkpoint()
        assert failures == ["[Errno 9] Bad file descriptor"] * 3


async def test_closing_while_the_waiting_tasks_are_being_cancelled() -> None:
    for _ in range(10):
        with wires(tiny=True) as (one, _other):
            with anyio.fail_after(5):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(one.receive_async)
                    await wait_all_tasks_blocked()
                    tasks.cancel_scope.cancel()
                    one.close()
        with wires() as (one, other):  # most likely under the same number
            await other.send_async(1, b"fresh")
            check(await one.receive_async(), Message(1, b"fresh", [], 0))


# The last frames, from another thread


@pytest.mark.parametrize("sizes", [[10], [400 * KIB], [10, 400 * KIB]])
def test_the_last_frames_are_whole_and_nothing_follows_them(sizes: list[int]) -> None:
    with wires(tiny=True) as (one, other), ThreadPoolExecutor(1) as executor:

        def end() -> None:
            with one.ending():
                for size in sizes:
                    one.send(2, b"last", [filled(size)])

        ending = executor.submit(end)
        for size in sizes:
            check(other.receive(10), Message(2, b"last", [filled(size)], 0))
        ending.result(10)
        with pytest.raises(WireClosedError, match="the other end closed"):
            other.receive(10)
        for body in ([], [filled(KIB)]):
            with pytest.raises(WireClosedError, match="Broken pipe"):
                one.send(3, b"later", body)
        other.send(4, b"back")
        check(one.receive(10), Message(4, b"back", [], 0))


async def test_a_frame_that_a_blocked_loop_has_begun_is_finished_before_the_last_ones() -> None:
    with wires(tiny=True) as (one, other), ThreadPoolExecutor(1) as executor:

        def end() -> None:
            with one.ending():
                one.send(2, b"last")

        begun = Message(1, b"begun", [filled(400 * KIB)], 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.send_async, 1, b"begun", begun.body)
            await wait_all_tasks_blocked()
            ending = executor.submit(end)
            check(other.receive(10), begun)
            check(other.receive(10), Message(2, b"last", [], 0))
            ending.result(10)
        with pytest.raises(WireClosedError, match="Broken pipe"):
            await one.send_async(3, b"later")


def test_the_last_frames_to_a_peer_that_is_gone() -> None:
    with wires() as (one, other):
        other.close()
        with pytest.raises(WireClosedError, match="Broken pipe"), one.ending():
            one.send(2, b"last")
        with one.ending():
            pass
