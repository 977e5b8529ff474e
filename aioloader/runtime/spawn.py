"""The trainer's and the engine's side of the zygote: start it, fork children from it, hear of their exits."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from aioloader.errors import HostError
from aioloader.runtime import zygote
from aioloader.runtime.wire import Frame, Wire, WireClosedError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ForkClient", "ZygoteProcess", "describe_exit"]

# One thread per worker: N workers with a pool of threads each only fight for the same cores.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # glibc gives big blocks back to the system at once and faults their pages in again for the next record; keep them.
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "536870912",
}
_STOP_TIMEOUT_S = 2.0
_EXIT_TIMEOUT_S = 0.1


class ZygoteProcess:
    """A running zygote, owned by the process that made it. Dies with its owner, whatever way that ends.

    Args:
        preload: Modules that it imports before it forks anything; all children share them.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid())]
            environment = {**os.environ, **_ENVIRONMENT}
            self._process = zygote.start_interpreter("aioloader.runtime.zygote", "main", arguments, [theirs.fileno()], environment)
        self._owner_pid = os.getpid()
        self._exits: dict[int, int] = {}
        self._wire = Wire(ours)
        self._wire.send(0, pickle.dumps(tuple(preload)))

    @property
    def pid(self) -> int:
        """Return the zygote's process id."""
        return self._process.pid

    def connect(self) -> socket.socket:
        """Return a new socket over which another process or thread may fork children (see `ForkClient`)."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._wire.send(zygote.CONNECT, descriptors=[theirs.fileno()])
        return ours

    def fork(self, entry: str, name: str, payload: bytes, descriptors: Sequence[int]) -> int:
        """Fork a child that runs `entry` ("module:function") and return its pid; duplicates of `descriptors` go along.

        Raises:
            HostError: The zygote ended.
        """
        self.begin_fork(entry, name, payload, descriptors)
        return self.finish_fork()

    def begin_fork(self, entry: str, name: str, payload: bytes, descriptors: Sequence[int]) -> None:
        """Ask for a child as `fork` does, without waiting for it. Raises as `fork`."""
        try:
            self._wire.send(zygote.FORK, pickle.dumps((entry, name)), [payload], descriptors)
        except WireClosedError as error:
            raise self.death(error) from error

    def finish_fork(self) -> int:
        """Return the pid of the child that was asked for, waiting for it. Raises as `fork`."""
        try:
            while (frame := self._wire.receive()) is None or frame.kind != zygote.FORKED:
                self._note(frame)
        except WireClosedError as error:
            raise self.death(error) from error
        pid: int = pickle.loads(frame.meta)
        return pid

    def exit_of(self, pid: int, timeout_s: float) -> int | None:
        """Return the exit code of a child of this handle (negative: a signal), or None if it is not known in time."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(WireClosedError):
            while pid not in self._exits and (frame := self._wire.receive(max(0.0, deadline - time.monotonic()))) is not None:
                self._note(frame)
        return self._exits.get(pid)

    def _note(self, frame: Frame | None) -> None:
        """Keep what a frame says of a child that ended, until somebody asks."""
        if frame is not None and frame.kind == zygote.EXITED:
            pid, exitcode = pickle.loads(frame.meta)
            self._exits[pid] = exitcode

    def death(self, cause: object) -> HostError:
        """Return the error for a zygote that does not answer."""
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        how = "does not answer" if code is None else describe_exit(code)
        return HostError(
            f"zygote (pid {self.pid}): expected it to run until the loader closes, but it {how} ({cause}); see its output above."
        )

    def close(self) -> None:
        """Kill all children and the zygote and wait for them; safe to call twice. A forked copy of the owner only lets go."""
        self._wire.close()
        if self._owner_pid != os.getpid():
            return
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ZygoteProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class ForkClient:
    """Forks children through a socket from `ZygoteProcess.connect`, inside an event loop.

    `run` must be running in a task of the owner's task group; it ends when the zygote does.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._wire = Wire(sock)
        self._questions: deque[_Question] = deque()
        self._exits: dict[int, int] = {}
        self._exited: dict[int, anyio.Event] = {}
        self._closed = False

    async def run(self) -> None:
        """Receive answers and exits until the zygote ends."""
        try:
            while True:
                frame = await self._wire.receive_async()
                if frame.kind == zygote.EXITED:
                    pid, exitcode = pickle.loads(frame.meta)
                    self._exits[pid] = exitcode
                    self._exited.setdefault(pid, anyio.Event()).set()
                else:
                    question = self._questions.popleft()
                    question.answer = frame
                    question.answered.set()
        except WireClosedError:
            self._closed = True
            for question in self._questions:
                question.answered.set()

    async def prepare(self, payload: bytes) -> str | None:
        """Have the zygote unpickle what children get; return the traceback if it could not."""
        frame = await self._ask(zygote.PREPARE, b"", [payload], [])
        failure: str | None = pickle.loads(frame.meta)
        return failure

    async def fork(self, entry: str, name: str, payload: bytes, descriptors: Sequence[int]) -> int:
        """Fork a child that runs `entry` and return its pid."""
        frame = await self._ask(zygote.FORK, pickle.dumps((entry, name)), [payload], descriptors)
        pid: int = pickle.loads(frame.meta)
        return pid

    async def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a child that has not been reaped yet; never hits a stranger that got the same pid."""
        with contextlib.suppress(WireClosedError):
            await self._wire.send_async(zygote.KILL, pickle.dumps((pid, number)))

    async def exit_of(self, pid: int, timeout_s: float) -> int | None:
        """Return the exit code of a child (negative: a signal), waiting at most `timeout_s` for it."""
        with anyio.move_on_after(timeout_s):
            await self._exited.setdefault(pid, anyio.Event()).wait()
        return self._exits.get(pid)

    def close(self) -> None:
        """Let go; the zygote kills the children forked here."""
        self._wire.close()

    async def _ask(self, kind: int, meta: bytes, body: list[bytes], descriptors: Sequence[int]) -> Frame:
        """Ask and return the answer. A cancelled caller leaves its question in place: answers come in the order of questions."""
        question = _Question()
        self._questions.append(question)
        try:
            await self._wire.send_async(kind, meta, body, descriptors)
        except BaseException as error:
            self._questions.remove(question)  # cancelled before anything was sent, or nobody is there to answer
            if isinstance(error, WireClosedError):
                raise HostError("zygote: expected an answer, but it ended; see its output above.") from error
            raise
        if not self._closed:
            await question.answered.wait()
        if question.answer is None:
            raise HostError("zygote: expected an answer, but it ended; see its output above.")
        return question.answer


class _Question:
    """What the zygote was asked and has not answered yet."""

    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.answer: Frame | None = None


def describe_exit(exitcode: int | None) -> str:
    """Return an exit code in words: "was killed by SIGKILL", "left with exit code 0"."""
    if exitcode is None:
        return "ended in a way that was not reported"
    if exitcode < 0:
        try:
            return f"was killed by {signal.Signals(-exitcode).name}"
        except ValueError:
            return f"was killed by signal {-exitcode}"
    return f"left with exit code {exitcode}"
