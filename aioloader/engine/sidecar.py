"""The sidecar: the engine in a process of its own, forked from the zygote, so that training code never slows it down."""

from __future__ import annotations

import contextlib
import functools
import pickle
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import anyio

from aioloader.engine.channel import ERROR
from aioloader.engine.plan import Plan
from aioloader.engine.session import serve
from aioloader.errors import ConfigError
from aioloader.runtime.moving import pack_error
from aioloader.runtime.wire import Wire, WireClosedError

__all__ = ["main", "run_engine"]


def main(payload: bytes, descriptors: Sequence[int], prepared: Any) -> None:
    """Entry of the sidecar: `payload` is the pickled plan, `descriptors` the sockets to the trainer and to the zygote."""
    trainer = socket.socket(fileno=descriptors[0])
    zygote = socket.socket(fileno=descriptors[1])
    try:
        plan = pickle.loads(payload)
    except BaseException:  # noqa: BLE001 - user modules may do anything at import
        error = ConfigError(
            "Loader",
            expected="source, batch and collate to load in the sidecar process",
            got=f"an error there:\n{traceback.format_exc()}",
            do="make their modules importable, or use host='thread'",
        )
        wire = Wire(trainer)
        with contextlib.suppress(WireClosedError):
            wire.send(ERROR, pack_error(error))
        return
    run_engine(plan, trainer, zygote)


def run_engine(plan: Plan, trainer: socket.socket, zygote: socket.socket | None) -> None:
    """Run the engine in this thread until the trainer closes its socket."""
    options = {"use_uvloop": _has_uvloop()}
    anyio.run(functools.partial(serve, plan, trainer, zygote), backend="asyncio", backend_options=options)


def _has_uvloop() -> bool:
    if sys.platform == "win32":
        return False
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True
