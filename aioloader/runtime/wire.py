"""Framed messages with file descriptors over a Unix stream socket, for blocking and for asynchronous callers.

    frame = header (kind, descriptors, meta bytes, body bytes) + meta + body

`try_receive` and `try_send` never wait: they hold all decisions. The blocking and the asynchronous methods around them only
wait for the descriptor, so that one state machine serves workers (blocking), the engine (anyio) and the trainer (both).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

import anyio

from aioloader.runtime.readable import ReadableSocket

__all__ = ["Frame", "Wire", "WireClosedError"]

_HEADER = struct.Struct("<BBxxIQ")
_BUFFER_BYTES = 1 << 18
_MAX_DESCRIPTORS = 16
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4)
_SHORT_BYTES = 1024
_MAX_PARTS = 256  # the kernel takes at most 1024 buffers in one sendmsg

Buffer = bytes | bytearray | memoryview


class WireClosedError(Exception):
    """The other end is gone."""


class Frame(NamedTuple):
    """One message: what `kind` means is for the two ends to agree on; `descriptors` belong to the receiver."""

    kind: int
    meta: bytearray
    body: memoryview
    descriptors: tuple[int, ...]


class Wire:
    """One end of a socket pair. Several tasks of one thread may send, one at a time receives; `ending` is for any thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._descriptors: deque[int] = deque()
        self._large: _LargeFrame | None = None
        self._send_lock: anyio.Lock | None = None
        self._sending = threading.RLock()  # also the garbage collector may close or send
        self._half_sent: _Outgoing | None = None
        self._num_waiting = 0
        self._reader: ReadableSocket | None = None
        self._incoming: select.poll | None = None

    def fileno(self) -> int:
        """Return the descriptor to wait on, -1 when closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket and any descriptor that was received and never claimed; safe to call twice.

        Tasks that wait for this end hear of it with `WireClosedError`, also one in the middle of a frame.
        """
        if self._num_waiting:
            with contextlib.suppress(anyio.NoEventLoopError):
                anyio.notify_closing(self._sock)  # event loops break on a descriptor that is closed while it is waited for
        if self._reader is not None:
            self._reader.close()
        self._sock.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    # Receiving

    def try_receive(self) -> Frame | None:
        """Return the next frame, or None when it has not arrived in whole.

        Raises:
            WireClosedError: The other end closed and no whole frame is left.
        """
        while True:
            frame = self._parse()
            if frame is not None:
                return frame
            try:
                received = self._fill()
            except (BlockingIOError, InterruptedError):
                return None
            except OSError as error:
                raise WireClosedError(str(error)) from error
            if received == 0:
                raise WireClosedError("the other end closed")

    def receive(self, timeout_s: float | None = None) -> Frame | None:
        """Return the next frame, waiting for it; None after `timeout_s`. Raises as `try_receive`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (frame := self.try_receive()) is None:
            if not self.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return None
        return frame

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until `try_receive` has something to read; return False after `timeout_s`."""
        if self._incoming is None:
            self._incoming = select.poll()
            self._incoming.register(self._sock, select.POLLIN)
        return bool(self._incoming.poll(None if timeout_s is None else timeout_s * 1000))

    async def receive_async(self) -> Frame:
        """Return the next frame, waiting for it in the event loop. Cancelling loses nothing. Raises as `try_receive`."""
        while (frame := self.try_receive()) is None:
            reader = self._readable()
            await (self._wait(anyio.wait_readable) if reader is None else reader.wait())
        return frame

    def _readable(self) -> ReadableSocket | None:
        """Return how to wait in an asyncio loop, None in any other."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        if self._reader is None or self._reader.loop is not loop:
            if self._sock.fileno() < 0:
                raise WireClosedError("this end is closed")
            self._reader = ReadableSocket(loop, self._sock)
        return self._reader

    def _parse(self) -> Frame | None:
        if self._large is not None:
            if self._large.missing:
                return None
            large, self._large = self._large, None
            return large.frame(self._claim(large.num_descriptors))
        available = self._end - self._start
        if available < _HEADER.size:
            return None
        kind, num_descriptors, meta_bytes, body_bytes = _HEADER.unpack_from(self._buffer, self._start)
        needed = _HEADER.size + meta_bytes + body_bytes
        if available < needed:
            if needed > _BUFFER_BYTES // 2:
                self._start_large(kind, num_descriptors, meta_bytes, body_bytes)
            return None
        at = self._start + _HEADER.size
        meta = self._buffer[at : at + meta_bytes]
        body = memoryview(self._buffer[at + meta_bytes : at + meta_bytes + body_bytes])
        self._start += needed
        if self._start == self._end:
            self._start = self._end = 0
        return Frame(kind, meta, body, self._claim(num_descriptors))

    def _start_large(self, kind: int, num_descriptors: int, meta_bytes: int, body_bytes: int) -> None:
        """Receive the rest of a frame that does not fit the buffer straight into memory of its own."""
        large = _LargeFrame(kind, num_descriptors, meta_bytes, body_bytes)
        have = self._view[self._start + _HEADER.size : self._end]
        large.put(have)
        self._start = self._end = 0
        self._large = large

    def _fill(self) -> int:
        if self._large is not None:
            received = self._sock.recv_into(self._large.rest())
            self._large.filled += received
            return received
        if self._end == _BUFFER_BYTES or (self._start and self._end > _BUFFER_BYTES // 2):
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        received, ancillary, _, _ = self._sock.recvmsg_into([self._view[self._end :]], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self._descriptors.extend(numbers)
        self._end += received
        return received

    def _claim(self, count: int) -> tuple[int, ...]:
        return tuple([self._descriptors.popleft() for _ in range(count)]) if count else ()

    # Sending

    def send(self, kind: int, meta: Buffer = b"", body: Sequence[Buffer] = (), descriptors: Sequence[int] = ()) -> None:
        """Send one frame, waiting for room.

        Raises:
            WireClosedError: The other end is gone.
        """
        if not body and not descriptors and self._send_short(kind, meta):
            return
        self._send_whole(_Outgoing(kind, meta, body, descriptors))

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Let this thread `send` the last frames: one that another thread has begun is finished first, and none follows them.

        Others learn of it with `WireClosedError`, the other end when it has received everything. Raises as `send`.
        """
        with self._sending:
            if self._half_sent is not None:
                self._send_whole(self._half_sent)
            yield
            with contextlib.suppress(OSError):  # the other end is gone
                self._sock.shutdown(socket.SHUT_WR)

    async def send_async(self, kind: int, meta: Buffer = b"", body: Sequence[Buffer] = (), descriptors: Sequence[int] = ()) -> None:
        """Send one frame, waiting for room in the event loop. A frame once begun is finished even when cancelled."""
        if self._send_lock is None:
            self._send_lock = anyio.Lock()
        if not body and not descriptors and not self._send_lock.locked() and self._send_short(kind, meta):
            return
        outgoing = _Outgoing(kind, meta, body, descriptors)
        if not self._send_lock.locked() and self._try_send(outgoing):
            return  # as nearly always: the lock alone would cost a round of the event loop
        if outgoing.begun:
            self._send_lock.acquire_nowait()
        else:
            await self._send_lock.acquire()
        try:
            while not self._try_send(outgoing):
                with anyio.CancelScope(shield=outgoing.begun):  # half a frame would break the stream for good
                    await self._wait(anyio.wait_writable)
        finally:
            self._send_lock.release()

    async def _wait(self, wait: Callable[[socket.socket], Awaitable[None]]) -> None:
        """Wait in the event loop, until this end is ready or closed."""
        self._num_waiting += 1
        try:
            await wait(self._sock)
        except anyio.ClosedResourceError:
            pass  # the next attempt says so
        finally:
            self._num_waiting -= 1

    def _send_short(self, kind: int, meta: Buffer) -> bool:
        """Send a frame at once if it is short and there is room; return whether it was sent, at a third of the usual cost."""
        if len(meta) >= _SHORT_BYTES:
            return False
        frame = _HEADER.pack(kind, 0, len(meta), 0) + meta
        try:
            with self._sending:
                return self._sock.send(frame) == len(frame)  # a stream between processes takes a short message whole or not at all
        except OSError:  # tried again in the usual way, where each kind is understood
            return False

    def _send_whole(self, outgoing: _Outgoing) -> None:
        while not self._try_send(outgoing):
            outgoing_room = select.poll()
            outgoing_room.register(self._sock, select.POLLOUT)
            outgoing_room.poll()

    def _try_send(self, outgoing: _Outgoing) -> bool:
        with self._sending:
            try:
                while outgoing.parts:
                    sent = self._sock.sendmsg(outgoing.parts[:_MAX_PARTS], outgoing.ancillary)
                    outgoing.advance(sent)
            except (BlockingIOError, InterruptedError):
                self._half_sent = outgoing if outgoing.begun else None
                return False
            except OSError as error:
                raise WireClosedError(str(error)) from error
            self._half_sent = None
            return True


class _LargeFrame:
    """A frame being received into memory of its own."""

    def __init__(self, kind: int, num_descriptors: int, meta_bytes: int, body_bytes: int) -> None:
        self.kind = kind
        self.num_descriptors = num_descriptors
        self._meta_bytes = meta_bytes
        self._memory = memoryview(bytearray(meta_bytes + body_bytes))
        self.filled = 0

    @property
    def missing(self) -> int:
        return len(self._memory) - self.filled

    def put(self, data: memoryview) -> None:
        self._memory[self.filled : self.filled + len(data)] = data
        self.filled += len(data)

    def rest(self) -> memoryview:
        return self._memory[self.filled :]

    def frame(self, descriptors: tuple[int, ...]) -> Frame:
        return Frame(self.kind, bytearray(self._memory[: self._meta_bytes]), self._memory[self._meta_bytes :], descriptors)


class _Outgoing:
    """A frame being sent: the parts not yet sent, and the descriptors until the first byte is."""

    def __init__(self, kind: int, meta: Buffer, body: Sequence[Buffer], descriptors: Sequence[int]) -> None:
        if len(descriptors) > _MAX_DESCRIPTORS:
            raise ValueError(f"Wire.send: expected at most {_MAX_DESCRIPTORS} descriptors, got {len(descriptors)}; send several messages.")
        views = [memoryview(part).cast("B") for part in body if len(part)]
        header = _HEADER.pack(kind, len(descriptors), len(meta), sum(len(view) for view in views))
        self.parts: list[Buffer] = [header + meta, *views] if len(meta) < 4096 else [header, memoryview(meta), *views]
        self.ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self.begun = False

    def advance(self, sent: int) -> None:
        self.begun = self.begun or sent > 0
        self.ancillary = []
        done = 0
        for part in self.parts:
            if sent < len(part):
                break
            sent -= len(part)
            done += 1
        del self.parts[:done]
        if sent:
            self.parts[0] = memoryview(self.parts[0])[sent:]
