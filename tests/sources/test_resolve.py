from __future__ import annotations

import functools
import importlib.metadata
from collections import UserList, deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from aioloader.errors import ConfigError
from aioloader.sources import AsyncIterableSource, IterableSource, JsonLines, SequenceSource, TextFiles, resolve_source


def generate() -> Iterator[int]:
    yield 1


async def generate_async() -> AsyncIterator[int]:
    yield 1


class AsyncThing:
    async def __aiter__(self) -> AsyncIterator[int]:
        yield 1


class InheritsAnIndex(UserList[int]):
    """Iterates in its own way; the index that it inherits does not."""

    def __iter__(self) -> Iterator[int]:
        yield 7


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: [1, 2], SequenceSource),
        (lambda: (), SequenceSource),
        (lambda: range(3), SequenceSource),
        (lambda: deque([1]), SequenceSource),
        (lambda: UserList([1]), SequenceSource),
        (lambda: np.zeros(3), SequenceSource),
        (lambda: InheritsAnIndex([1, 2]), IterableSource),
        (lambda: generate, IterableSource),
        (lambda: generate(), IterableSource),
        (lambda: functools.partial(map, str, [1]), IterableSource),
        (lambda: map(str, [1]), IterableSource),
        (lambda: {"a": 1}.items(), IterableSource),
        (lambda: generate_async, AsyncIterableSource),
        (lambda: functools.partial(generate_async), AsyncIterableSource),
        (lambda: generate_async(), AsyncIterableSource),
        (AsyncThing, AsyncIterableSource),
    ],
)
def test_each_kind_of_object_finds_its_source(make: Callable[[], object], kind: type) -> None:
    assert type(resolve_source(make())) is kind


def test_a_source_stays_what_it_is() -> None:
    source = IterableSource([1])
    assert resolve_source(source) is source


@pytest.mark.parametrize(
    ("names", "kind"),
    [(["a.jsonl"], JsonLines), (["a.ndjson", "b.JSONL"], JsonLines), (["a.txt", "b.md", "c.py", "LICENSE"], TextFiles)],
)
def test_paths_find_their_source_by_what_they_match(tmp_path: Path, names: list[str], kind: type) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    paths = [tmp_path / name for name in names]
    for obj in (tmp_path, str(tmp_path), paths, [str(path) for path in paths], f"{tmp_path}/*"):
        assert type(resolve_source(obj)) is kind


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["a.jsonl", "b.txt"], "expected files of one kind, got .jsonl, .txt"),
        (
            ["a.txt", "b.tar"],
            "expected .jsonl, .ndjson, .parquet or text files, got .tar files in .*; convert them, this version does not read them",
        ),
        (["a.txt", "b.parquet"], "expected files of one kind, got .parquet, .txt"),
        (["a.jsonl.gz"], "expected plain files, got .*decompress it first"),
    ],
)
def test_paths_that_could_mean_two_things_are_refused(tmp_path: Path, names: list[str], match: str) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=rf"Loader\(source\): {match}"):
        resolve_source(tmp_path)


@pytest.mark.parametrize(
    ("obj", "match"),
    [
        ({"train": [1], "test": [2]}, "got a dict of 'train', 'test'; pass one of its values"),
        ({1, 2}, "expected records in a stable order, got a set; pass sorted"),
        (frozenset(), "got a frozenset"),
        (b"bytes", "got a bytes"),
        (3, "got int; give it __iter__, or wrap it in a generator function"),
        (None, "got NoneType"),
        ("s3://bucket/a.jsonl", "expected a local path, got 's3://bucket/a.jsonl'"),
        (["one text", "another text"], "expected an existing file or directory, got 'one text'"),
        (TextFiles, "expected an iterable of records or a function without arguments"),
    ],
)
def test_what_is_no_stream_is_refused(obj: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve_source(obj)


def test_a_list_of_texts_is_told_apart_from_paths_in_the_message() -> None:
    with pytest.raises(ConfigError, match=r"a list of paths, of records in SequenceSource\(...\): expected an existing file"):
        resolve_source(["one text"])


def test_texts_that_are_too_long_for_paths_are_refused_as_such_with_their_beginning() -> None:
    with pytest.raises(ConfigError, match=r"expected an existing file or directory, got 'long long (long )+l?o?n?g?; check"):
        resolve_source(["long " * 2000])
    with pytest.raises(ConfigError, match="expected files that match 'why"):
        resolve_source(["why? " * 2000])


async def test_coroutine_functions_are_refused() -> None:
    async def no_stream() -> list[int]:
        return []

    with pytest.raises(ConfigError, match=r"Loader\(source\): expected a source, a path, .* got test_coroutine_functions"):
        resolve_source(no_stream)


class Table:
    """Has columns, as a data frame has: neither a mapping nor a sequence of rows."""

    def keys(self) -> list[str]:
        return ["column"]

    def __getitem__(self, name: str) -> list[int]:
        return [1]

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["column"])


def test_tables_of_columns_are_refused() -> None:
    with pytest.raises(ConfigError, match="got a Table of keys; pass one of its values"):
        resolve_source(Table())


Adapt = Callable[[object], object]


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> dict[str, Adapt]:
    """Installs adapters by name, and nothing else, for one test."""
    installed: dict[str, Adapt] = {}

    class Entry:
        def __init__(self, name: str) -> None:
            self.name = name
            self.value = f"some_package:{name}"

        def load(self) -> Adapt:
            return installed[self.name]

    def find(*, group: str) -> list[Entry]:
        assert group == "aioloader.adapters"
        return [Entry(name) for name in installed]

    monkeypatch.setattr(importlib.metadata, "entry_points", find)
    return installed


@pytest.fixture
def foreign() -> Any:
    """An object of a class that some framework made."""
    module = ModuleType("some_framework")
    exec("class Thing:\n    def __iter__(self):\n        return iter([1])", module.__dict__)
    return module.Thing()


def test_adapters_are_asked_in_order_of_their_names(adapters: dict[str, Adapt], foreign: Any) -> None:
    source = SequenceSource([3])
    asked: list[str] = []

    def adapter(name: str, answer: object) -> Adapt:
        def adapt(obj: object) -> object:
            asked.append(name)
            return answer

        return adapt

    adapters.update(c=adapter("c", None), b=adapter("b", source), a=adapter("a", None))
    assert resolve_source(foreign) is source
    assert asked == ["a", "b"]


def test_adapters_are_not_asked_about_python_s_own_types(adapters: dict[str, Adapt]) -> None:
    adapters["a"] = lambda obj: pytest.fail("asked")
    assert isinstance(resolve_source([1]), SequenceSource)
    assert isinstance(resolve_source(deque([1])), SequenceSource)
    assert isinstance(resolve_source(generate), IterableSource)


def fail(obj: object) -> object:
    raise ImportError("its framework is gone")


@pytest.mark.parametrize(("adapt", "match"), [(fail, "got ImportError: its framework is gone"), (lambda obj: 3, "got a int")])
def test_a_broken_adapter_is_named_and_left_out(adapters: dict[str, Adapt], foreign: Any, adapt: Adapt, match: str) -> None:
    adapters["broken"] = adapt
    with pytest.warns(RuntimeWarning, match=rf"adapter broken \(some_package:broken\): expected a source or None, {match}"):
        source = resolve_source(foreign)
    assert isinstance(source, IterableSource)


def test_an_adapter_may_refuse(adapters: dict[str, Adapt], foreign: Any) -> None:
    def refuse(obj: object) -> object:
        raise ConfigError("here", expected="a", got="b", do="c")

    adapters["a"] = refuse
    with pytest.raises(ConfigError, match="here: expected a, got b; c"):
        resolve_source(foreign)
