"""The trainer's side of the engine: what it received early and never opened is let go of like everything else."""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioloader import FixedBatch, HostError, Loader, SourceError
from aioloader.engine.channel import BATCH, END, ERROR, RUN, STATS, TAKEN, Delivered
from aioloader.engine.host import Ahead, Ended, Host
from aioloader.engine.layout import Layout
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


def receive(host: Host) -> Delivered:
    """Take the next message, which the other thread may not have sent yet."""
    while (delivered := host.try_receive()) is None:
        host.wait()
    return delivered


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


class Counts:
    """Stands in for an engine: sends micro-batches as it is told to, and counts those that it hears were taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aioloader.engine.host.run_engine", lambda _plan, end, _client: setattr(self, "wire", Wire(end)))
        plan: Any = SimpleNamespace(pool="thread")
        self.wire: Any = None
        self.host = Host(plan, "thread")
        while self.wire is None:
            pass
        self.wire.send(BATCH, self.message(10, told_every=4))

    @staticmethod
    def message(number: int, *, told_every: int) -> bytes:
        entry = ((0,) * 8, Layout((), (), 0), b"", pickle.dumps([]), pickle.dumps({}), 0)
        return pickle.dumps(([entry] * number, None, [], told_every))

    def heard(self) -> list[int]:
        found = []
        while (frame := self.wire.try_receive()) is not None:
            assert frame.kind == TAKEN
            found.append(pickle.loads(frame.meta)[0])
        return found

    def take(self, number: int) -> None:
        for _ in range(number):
            receive(self.host)
            self.host.taken()

    def close(self) -> None:
        self.host.close()
        self.wire.close()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    counts = Counts(monkeypatch)
    yield counts
    counts.close()


def test_the_engine_hears_of_several_deliveries_at_once(engine: Counts) -> None:
    engine.take(3)
    assert engine.heard() == []
    engine.take(1)
    assert engine.heard() == [4]
    engine.take(5)
    assert engine.heard() == [4]


def test_the_engine_hears_of_all_deliveries_when_the_trainer_has_nothing_left(engine: Counts) -> None:
    """Else each might wait for the other for ever."""
    engine.take(9)
    assert engine.heard() == [4, 4]
    assert engine.host.look() == Ahead(1, "nothing yet")
    assert engine.heard() == []
    engine.take(1)
    assert engine.host.try_receive() is None
    assert engine.heard() == [2]
    assert engine.host.try_receive() is None
    assert engine.heard() == []


def test_looking_for_more_tells_as_well(engine: Counts) -> None:
    engine.take(10)
    assert engine.heard() == [4, 4]
    assert engine.host.look() == Ahead(0, "nothing yet")
    assert engine.heard() == [2]


@pytest.mark.parametrize("kind", [END, ERROR])
def test_the_end_of_a_pass_tells_before_the_next_begins(engine: Counts, kind: int) -> None:
    """Records of one pass would be taken from the budget of the next."""
    engine.wire.send(kind, json.dumps({}).encode() if kind == END else pack_error(SourceError("gone")))
    assert engine.host.look() == Ahead(10, "end" if kind == END else "failure")
    engine.take(10)
    with pytest.raises((Ended, SourceError)):
        receive(engine.host)
    assert engine.heard() == [4, 4, 2]


def answer(engine: Counts, numbers: dict[str, int]) -> None:
    engine.wire.send(STATS, pickle.dumps(numbers))


def asked(engine: Counts) -> int:
    """Return how often the engine was asked for its numbers since the last time."""
    number = 0
    while (frame := engine.wire.try_receive()) is not None:
        number += frame.kind == STATS
    return number


def begin(engine: Counts) -> None:
    run: Any = None
    engine.host.run(run)


def test_a_pass_that_is_left_is_asked_for_its_numbers(engine: Counts) -> None:
    begin(engine)
    answer(engine, {"in_flight": 3})
    assert engine.host.last_stats() == {"in_flight": 3}
    assert asked(engine) == 1


@pytest.mark.parametrize("kind", [END, ERROR])
def test_a_pass_that_is_over_has_said_its_numbers(engine: Counts, kind: int) -> None:
    begin(engine)
    engine.wire.send(kind, json.dumps({}).encode() if kind == END else pack_error(SourceError("gone")), [pickle.dumps({"in_flight": 2})])
    with pytest.raises((Ended, SourceError)):
        engine.take(11)
    assert engine.host.last_stats() == {"in_flight": 2}
    assert asked(engine) == 0


def test_an_engine_that_does_not_answer_is_not_waited_for_long(engine: Counts) -> None:
    begin(engine)
    answer(engine, {"in_flight": 1})
    engine.host.stats()
    started = time.monotonic()
    assert engine.host.last_stats() == {"in_flight": 1}
    assert 0.2 <= time.monotonic() - started < 1
    assert asked(engine) == 2


def test_an_engine_that_is_gone_is_not_waited_for(engine: Counts) -> None:
    begin(engine)
    answer(engine, {"in_flight": 1})
    engine.host.stats()
    engine.wire.close()
    started = time.monotonic()
    assert engine.host.last_stats() == {"in_flight": 1}
    assert time.monotonic() - started < 0.1


def test_half_a_message_does_not_keep_a_pass_from_being_left(engine: Counts) -> None:
    begin(engine)
    engine.wire.send(STATS, b"no pickle")
    assert engine.host.last_stats() == {}


def test_the_thread_of_the_engine_does_not_ask_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the garbage collector runs in it, and finds an iterator."""
    hosts: queue.SimpleQueue[Host] = queue.SimpleQueue()
    found: list[Any] = []

    def collects(_plan: Any, end: socket.socket, _client: Any) -> None:
        with contextlib.closing(Wire(end)) as wire:
            found.extend((hosts.get().last_stats(), wire.receive(), wire.try_receive()))

    monkeypatch.setattr("aioloader.engine.host.run_engine", collects)
    plan: Any = SimpleNamespace(pool="thread")
    host = Host(plan, "thread")
    run: Any = None
    host.run(run)
    hosts.put(host)
    with pytest.raises(HostError, match="it ended"):
        receive(host)
    host.close()
    stats, frame, then = found
    assert (stats, frame.kind, then) == ({}, RUN, None)
