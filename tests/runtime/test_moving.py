"""Moving objects between processes: by value where the main module defined them, generators by name, errors whatever they hold."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

from aioloader.errors import AioLoaderError, ConfigError, PreprocessError, ResumeError, SourceError, SynchronizationError, WorkerError
from aioloader.runtime.moving import dumps, pack_argument, pack_error, unpack_error


def moved(value: Any) -> Any:
    return pickle.loads(dumps(value))


def test_lambdas_closures_and_local_classes_travel_by_value() -> None:
    offset = 3

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    assert moved(lambda value: value + offset)(4) == 7
    assert moved(Local(5)).value == 5


def test_the_main_module_of_a_spawned_process_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """`multiprocessing` names it `__mp_main__`, which no other process can import."""
    spawned = types.ModuleType("__mp_main__")
    exec("def double(value):\n    return 2 * value", spawned.__dict__)
    monkeypatch.setitem(sys.modules, "__mp_main__", spawned)
    data = dumps(spawned.double)
    monkeypatch.delitem(sys.modules, "__mp_main__")
    assert pickle.loads(data)(4) == 8


@pytest.mark.parametrize("name", ["random", "gauss", "randint", "shuffle"])
def test_functions_of_the_global_generators_travel_by_name(name: str) -> None:
    assert moved(getattr(random, name)) == getattr(random, name)
    assert moved(getattr(random, name)).__self__ is random._inst


@pytest.mark.parametrize("name", ["rand", "normal", "randint", "permutation"])
def test_numpy_functions_of_the_global_generator_travel_by_name(name: str) -> None:
    assert moved(getattr(np.random, name)).__self__ is np.random.mtrand._rand


def test_a_generator_of_ones_own_travels_with_its_state() -> None:
    own = random.Random(7)
    copy = moved(own.random)
    assert copy() == random.Random(7).random()
    assert copy.__self__ is not own


def test_functions_of_the_main_module_move_to_a_process_that_has_another() -> None:
    program = """
        import random, sys
        from aioloader.runtime.moving import dumps
        class Point:
            def __init__(self, x): self.x = x
            def double(self): return Point(2 * self.x)
        def work(point): return point.double().x + helper(1)
        def helper(n): return n
        sys.stdout.buffer.write(dumps((work, Point(4), random.random)))
    """
    data = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=True, timeout=15).stdout
    work, point, draw = pickle.loads(data)
    assert work(point) == 9
    assert draw.__self__ is random._inst


class Unpicklable:
    def __reduce__(self) -> NoReturn:
        raise OSError("not today")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (threading.Lock(), r"Loader\(source=\): expected something that can move to another process, got a lock.*cannot pickle.*; use"),
        ((number for number in range(3)), r"got generator .*genexpr.*cannot pickle"),
        (Unpicklable(), r"got a Unpicklable, which cannot \(not today\)"),
        (open, None),
    ],
    ids=["lock", "generator", "own error", "builtin"],
)
def test_an_argument_that_cannot_move_is_named(value: Any, message: str | None) -> None:
    if message is None:
        assert pickle.loads(pack_argument("Loader(source=)", value, do="use host='thread'")) is value
    else:
        with pytest.raises(ConfigError, match=message):
            pack_argument("Loader(source=)", value, do="use host='thread'")


ERRORS: list[Callable[[], AioLoaderError]] = [
    lambda: ConfigError("Loader", expected="x", got=3, do="do"),
    lambda: SourceError("broken", record=("shard", 3), seq=4),
    lambda: PreprocessError("broken", record=("shard", 3), seq=4, lane=1, worker="2", remote_traceback="Traceback ..."),
    lambda: WorkerError("died", pid=4, exitcode=-9, seqs=[3, 4], worker="1"),
    lambda: ResumeError([("what", 1, 2)], do="do"),
    lambda: SynchronizationError("all_reduce", "late", missing=[3]),
]


@pytest.mark.parametrize("make", ERRORS)
def test_our_errors_arrive_with_their_facts_and_cause(make: Callable[[], AioLoaderError]) -> None:
    error = make()
    error.__cause__ = KeyError("cause")
    error.add_note("a note")
    copy = unpack_error(pack_error(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert {name: value for name, value in vars(copy).items() if name != "__notes__"} == {
        name: value for name, value in vars(error).items() if name != "__notes__"
    }
    assert "a note" in copy.__notes__
    assert type(copy.__cause__) is KeyError
    assert copy.__cause__.args == ("cause",)


class StubbornError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def failing() -> NoReturn:
    raise StubbornError(1, 2)


def test_a_cause_that_cannot_move_is_there_as_text() -> None:
    error = SourceError("broken")
    try:
        failing()
    except StubbornError as cause:
        error.__cause__ = cause
    copy = unpack_error(pack_error(error))
    assert copy.__cause__ is None
    assert any("in failing" in note and "StubbornError: 1 and 2" in note for note in copy.__notes__)


@pytest.mark.parametrize("got", [threading.Lock(), Unpicklable()], ids=["lock", "own error"])
def test_an_error_that_holds_what_cannot_move_still_arrives_as_what_it_is(got: object) -> None:
    error = ConfigError("Source", expected="numbers", got=got, do="give some")
    error.__cause__ = ValueError("because")
    copy = unpack_error(pack_error(error))
    assert isinstance(copy, ConfigError)
    assert (str(copy), copy.where, copy.got) == (str(error), "Source", repr(got))
    assert isinstance(copy.__cause__, ValueError)


class ForeignError(AioLoaderError):
    def __init__(self, one: int, *, two: int) -> None:
        self.lock = threading.Lock()
        super().__init__(f"{one} {two}")


def test_any_other_error_that_cannot_move_arrives_as_text() -> None:
    copy = unpack_error(pack_error(ForeignError(1, two=2)))
    assert type(copy) is AioLoaderError
    assert str(copy) == "ForeignError: 1 2"
