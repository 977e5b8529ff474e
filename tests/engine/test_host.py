"""The trainer's side of the engine: what it received early and never opened is let go of like everything else."""

from __future__ import annotations

import json
import pickle
import socket
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioloader import FixedBatch, HostError, Loader, SourceError
from aioloader.engine.channel import END, ERROR, STATS
from aioloader.engine.host import Ended, Host
from aioloader.runtime.moving import pack_error
from aioloader.runtime.wire import Wire


def large(number: int) -> Any:
    return np.full(100_000, number, np.int32)


def stacked(samples: list[Any]) -> dict[str, Any]:
    return {"x": np.stack(samples)}


@pytest.mark.parametrize("host", ["process", "thread"])
def test_batches_that_came_before_the_numbers_asked_for_are_delivered_in_order(host: str) -> None:
    with Loader(range(20), preprocess=large, batch=FixedBatch(1), collate=stacked, workers=1, pool="thread", host=host) as loader:
        seen = []
        for batch in loader:
            seen.append(int(batch["x"][0, 0]))
            loader.stats()
        assert seen == list(range(20))


@pytest.mark.parametrize("host", ["process", "thread"])
def test_batches_that_came_early_and_are_never_taken_leave_nothing(host: str) -> None:
    """What is left is found by the check around every test."""
    with Loader(range(20), preprocess=large, batch=FixedBatch(1), collate=stacked, workers=1, pool="thread", host=host) as loader:
        iterator = iter(loader)
        next(iterator)
        while loader.stats()["waiting_batches"] < 2:
            pass


def says_everything(_plan: Any, end: socket.socket, _client: Any) -> None:
    """What stands in for an engine: a message of each kind that is no micro-batch, one of no kind, and the end of the line."""
    wire = Wire(end)
    wire.send(END, json.dumps({"position": 3}).encode(), [pickle.dumps({"workers": 2})])
    wire.send(ERROR, pack_error(SourceError("the disk is gone")))
    wire.send(max(END, ERROR, STATS) + 50)
    wire.close()


def receive(host: Host) -> None:
    """Take the next message, which the other thread may not have sent yet."""
    while host.try_receive() is None:
        host.wait()


def test_each_message_of_the_engine_moves_the_trainer_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A051, A052: a micro-batch (see test_channel.py), the end, an error; anything else is our own mistake, and so is silence."""
    monkeypatch.setattr("aioloader.engine.host.run_engine", says_everything)
    plan: Any = SimpleNamespace(pool="thread")
    host = Host(plan, "thread")
    try:
        with pytest.raises(Ended, match="the pass is over") as ended:
            receive(host)
        with pytest.raises(SourceError, match="the disk is gone"):
            receive(host)
        with pytest.raises(HostError, match="expected micro-batches, an end or an error, got message"):
            receive(host)
        with pytest.raises(HostError, match="expected it to run until the loader closes, but it ended"):
            receive(host)
    finally:
        host.close()
    assert ended.value.state == {"position": 3}
