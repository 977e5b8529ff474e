"""What the tests have children of the zygote run."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def tell(payload: bytes, descriptors: Sequence[int], prepared: Any) -> None:
    """Write down what this process sees of itself, to the first descriptor."""
    held = {int(entry.name): str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if is_open(int(entry.name))}
    with open("/proc/self/comm") as file:
        name = file.read().strip()
    facts = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "name": name,
        "payload": payload,
        "prepared": prepared,
        "num_descriptors": len(descriptors),
        "held": held,
        "descriptors": list(descriptors),
        "modules": set(sys.modules),
        "threads": threading.active_count(),
        "path": list(sys.path),
        "main_file": getattr(sys.modules["__main__"], "__file__", None),
        "environ": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")},
        "stdin": str(Path("/proc/self/fd/0").readlink()),
    }
    os.write(descriptors[0], pickle.dumps(facts))


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the one that listed the folder
        return False
    return True


def leave(payload: bytes, _descriptors: Sequence[int], _prepared: Any) -> None:
    os._exit(int(payload))


def kill_itself(payload: bytes, _descriptors: Sequence[int], _prepared: Any) -> None:
    os.kill(os.getpid(), int(payload))


def fail(payload: bytes, _descriptors: Sequence[int], _prepared: Any) -> None:
    raise RuntimeError(payload.decode())


def finish(_payload: bytes, _descriptors: Sequence[int], _prepared: Any) -> None:
    """Return at once."""


def wait(_payload: bytes, descriptors: Sequence[int], _prepared: Any) -> None:
    """Say that this runs, then wait for a signal, for ever."""
    if descriptors:
        os.write(descriptors[0], b"waiting")
    while True:
        signal.pause()


class StartsThread:
    """Starts a thread wherever it is loaded, as some libraries do at import."""

    def __reduce__(self) -> Any:
        return start_thread, ()


def start_thread() -> str:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return "made beside a thread"
