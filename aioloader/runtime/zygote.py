"""The zygote: a clean, single-threaded process from which the sidecar and the workers are forked in milliseconds.

It is a fresh interpreter, so nothing of the trainer's threads, locks or CUDA state is inherited and the user's main module is
not imported again. It imports what all children need before it forks any, and what the preprocess function needs once (`PREPARE`);
all children share that memory. Where that import starts threads, forking would copy locked locks, so children are fresh interpreters
from then on.

The zygote watches its trainer through a pidfd and its clients through their sockets. When the trainer is gone it kills its
children and ends; when the zygote itself is killed the kernel kills the children (`PR_SET_PDEATHSIG`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import marshal
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from aioloader.runtime.wire import Frame, Wire, WireClosedError

__all__ = ["CONNECT", "EXITED", "FORK", "FORKED", "KILL", "PREPARE", "PREPARED", "Entry", "main", "start_interpreter"]

CONNECT, FORK, PREPARE, KILL = 1, 2, 3, 4  # requests; CONNECT and FORK carry descriptors
FORKED, PREPARED, EXITED = 11, 12, 13  # answers and events

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

# Only what is built into the interpreter is imported before the paths are set.
_PROGRAM = """
import marshal, sys
with open({}, "rb") as file:
    sys.path[:], paths = marshal.load(file)
from {} import {} as main
main(paths)
"""

Entry = Callable[[bytes, Sequence[int], Any], None]
"""What a child runs: entry(payload, descriptors, prepared object)."""


class _Zygote:
    def __init__(self, trainer: Wire, trainer_pid: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._trainer = trainer
        self._clients: dict[int, Wire] = {}  # by descriptor
        self._children: dict[int, int] = {}  # pid -> descriptor of the client that asked for it
        self._prepared: Any = None
        self._threaded = False
        self._serving = True
        self._add(self._trainer)
        self._pidfd = _open_pidfd(trainer_pid)
        if self._pidfd is not None:
            self._selector.register(self._pidfd, selectors.EVENT_READ, self._stop)
        self._wakeup, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGINT, _ignore)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the engine may ask a worker for its stack before that can answer
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back since before this interpreter started
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._reap)

    def serve(self) -> None:
        self._answer(self._trainer.fileno())  # requests that came along with the first frame are in the wire's buffer
        while self._serving:
            for key, _ in self._selector.select():
                key.data()
        for pid in list(self._children):
            _kill(pid, signal.SIGKILL)
        for pid in list(self._children):
            os.waitpid(pid, 0)

    def _stop(self) -> None:
        self._serving = False

    def _add(self, wire: Wire) -> None:
        descriptor = wire.fileno()
        self._clients[descriptor] = wire
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._answer(descriptor))

    def _drop(self, descriptor: int) -> None:
        """Forget a client; what it started has no owner any more and is killed."""
        self._selector.unregister(descriptor)
        wire = self._clients.pop(descriptor)
        wire.close()
        for pid, owner in self._children.items():
            if owner == descriptor:
                _kill(pid, signal.SIGKILL)
        self._serving = self._serving and wire is not self._trainer

    def _answer(self, descriptor: int) -> None:
        wire = self._clients.get(descriptor)
        try:
            while wire is not None and (frame := wire.try_receive()) is not None:
                self._handle(descriptor, wire, frame)
        except WireClosedError:
            self._drop(descriptor)

    def _handle(self, descriptor: int, wire: Wire, frame: Frame) -> None:
        if frame.kind == CONNECT:
            self._add(Wire(socket.socket(fileno=frame.descriptors[0])))
        elif frame.kind == FORK:
            pid = self._fork(frame)
            self._children[pid] = descriptor
            for number in frame.descriptors:
                os.close(number)
            wire.send(FORKED, pickle.dumps(pid))
        elif frame.kind == PREPARE:
            wire.send(PREPARED, pickle.dumps(self._prepare(frame.body)))
        elif frame.kind == KILL:
            pid, number = pickle.loads(frame.meta)
            if pid in self._children:
                _kill(pid, number)

    def _prepare(self, payload: memoryview) -> str | None:
        """Unpickle the object that children get; return the traceback if that fails."""
        try:
            self._prepared = pickle.loads(payload)
        except BaseException:  # noqa: BLE001 - whatever user modules do at import is reported, not raised here
            return traceback.format_exc()
        self._threaded = len(os.listdir("/proc/self/task")) > 1
        if self._threaded:
            self._payload = bytes(payload)
        return None

    def _fork(self, frame: Frame) -> int:
        entry, name = pickle.loads(frame.meta)
        if self._threaded:
            return self._exec(entry, name, frame)
        parent = os.getpid()
        gc.freeze()  # the collector would otherwise touch, and so copy, every page shared with the children
        pid = os.fork()
        if pid == 0:
            self._child(entry, name, frame, parent)
        return pid

    def _child(self, entry: str, name: str, frame: Frame, parent: int) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for wire in self._clients.values():
            wire.close()
        self._selector.close()
        self._wakeup.close()
        self._wakeup_writer.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        _run_child(entry, name, bytes(frame.body), frame.descriptors, self._prepared, parent)

    def _exec(self, entry: str, name: str, frame: Frame) -> int:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = start_interpreter("aioloader.runtime.zygote", "_exec_main", [str(theirs.fileno())], [theirs.fileno()])
            process.returncode = 0  # reaped by this loop, not by Popen
            theirs.close()
            meta = pickle.dumps((entry, name, len(frame.body), os.getpid()))
            wire = Wire(ours)
            with contextlib.suppress(WireClosedError):  # a child that died at once is reaped and reported like any other
                wire.send(FORK, meta, [frame.body, self._payload], frame.descriptors)
        return process.pid

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                client = self._clients.get(self._children.pop(pid))
                if client is not None:
                    self._tell(client, pid, os.waitstatus_to_exitcode(status))

    def _tell(self, client: Wire, pid: int, exitcode: int) -> None:
        try:
            client.send(EXITED, pickle.dumps((pid, exitcode)))
        except WireClosedError:
            self._drop(client.fileno())


def _exec_main(paths: Sequence[str]) -> NoReturn:
    """Entry of a child that is a fresh interpreter: receive what a forked child would have inherited."""
    sys.path[:] = paths
    wire = Wire(socket.socket(fileno=int(sys.argv[-1])))
    frame = wire.receive()
    if frame is None:
        os._exit(1)
    wire.close()
    entry, name, payload_bytes, parent = pickle.loads(frame.meta)
    prepared = pickle.loads(frame.body[payload_bytes:])
    _run_child(entry, name, bytes(frame.body[:payload_bytes]), frame.descriptors, prepared, parent)


def _run_child(entry: str, name: str, payload: bytes, descriptors: Sequence[int], prepared: Any, parent: int) -> NoReturn:
    """Run `module:function` and leave without running the interpreter's exit handlers."""
    status = 1
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked to go with it
            os._exit(status)
        _prctl(_PR_SET_NAME, name.encode()[:15])
        signal.signal(signal.SIGINT, _ignore)  # Ctrl-C is for the trainer to answer; it closes us
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)(payload, descriptors, prepared)
        status = 0
    except BaseException:  # noqa: BLE001 - the last frame of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextlib.contextmanager
def _ctrl_c_held() -> Iterator[None]:
    """Hold back Ctrl-C in this thread and in processes started in the block, which would print a traceback while they start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_interpreter(
    module: str, function: str, arguments: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `module.function()` in a fresh interpreter with this one's flags and paths; the descriptors go along.

    Its first argument is `sys.path` for what is the user's. Until it sets that, modules are searched in the standard library, then
    where this package lies, then there: another version of the package may be installed than the one that runs here, and a folder on
    the paths may hold modules named like those of the library. The paths may be longer than a command line.
    """
    entries: Sequence[object] = sys.path  # which a user may have put anything on; imports pass over what is no text
    paths = [str.__str__(path) for path in entries if isinstance(path, str)]  # subclasses say other things of themselves
    library = os.path.dirname(os.__file__)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    first = [library, os.path.join(library, "lib-dynload"), *([] if root in paths else [root]), *paths]
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    with open(os.memfd_create("aioloader-paths"), "w+b") as file:
        file.write(marshal.dumps((first, paths)))
        file.seek(0)
        command = [sys.executable, *flags, "-c", _PROGRAM.format(file.fileno(), module, function), *arguments]
        with _ctrl_c_held():
            return subprocess.Popen(command, pass_fds=[*descriptors, file.fileno()], stdin=subprocess.DEVNULL, env=environment)


def _ignore(_signal: int, _frame: object) -> None:
    """Take a signal without acting; unlike SIG_IGN this is not inherited by what a worker executes."""


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # before Linux 5.3, or the trainer is gone: its socket tells as much
        return None


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(paths: Sequence[str]) -> None:
    """Entry of the zygote's interpreter: the socket and the trainer's pid are the last arguments; what to preload comes first."""
    trainer = Wire(socket.socket(fileno=int(sys.argv[-2])))
    frame = trainer.receive()
    if frame is not None:
        for module in pickle.loads(frame.meta):
            importlib.import_module(module)
        sys.path[:] = paths
        _Zygote(trainer, int(sys.argv[-1])).serve()
