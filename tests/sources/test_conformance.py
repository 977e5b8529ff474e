"""Every source keeps the contract of `aioloader.protocols.Source`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioloader.protocols import Record, Source
from aioloader.sources import AsyncIterableSource, IterableSource, JsonLines, SequenceSource, TextFiles
from tests.sources.conformance import check_foreign_cursors, check_source, read_all, run, same

RECORDS: list[dict[str, Any]] = [{"id": number, "text": "é" * (number % 5), "none": None} for number in range(17)]


class Stateful:
    """Iterates with a place of its own that it can save and restore."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Record]:
        while self.next < len(RECORDS):
            self.next += 1
            yield RECORDS[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class StatefulIterator:
    """An iterator that saves its place, made by an iterable that does not."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> StatefulIterator:
        return self

    def __next__(self) -> Record:
        if self.next == len(RECORDS):
            raise StopIteration
        self.next += 1
        return RECORDS[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class MakesStatefulIterators:
    def __iter__(self) -> StatefulIterator:
        return StatefulIterator()


class AsyncStateful(Stateful):
    async def __aiter__(self) -> AsyncIterator[Record]:
        for record in iter(self):
            yield record


class Batched:
    def __len__(self) -> int:
        return len(RECORDS)

    def __getitem__(self, index: int) -> Record:
        return RECORDS[index]

    def __getitems__(self, indices: list[int]) -> list[Record]:
        return [RECORDS[index] for index in indices]


def generate() -> Iterator[Record]:
    yield from RECORDS


async def generate_async() -> AsyncIterator[Record]:
    for record in RECORDS:
        yield record


def text_files(directory: Path) -> TextFiles:
    for number, record in enumerate(RECORDS):
        directory.joinpath(f"{number:02}.txt").write_text(record["text"], encoding="utf-8")
    return TextFiles(directory)


def json_lines(directory: Path) -> JsonLines:
    for first, name in ((0, "a"), (5, "b"), (6, "d"), (17, "e")):
        stop = {"a": 5, "b": 6, "d": 17, "e": 17}[name]
        lines = [json.dumps(record, ensure_ascii=number % 2 == 0) for number, record in enumerate(RECORDS[first:stop])]
        directory.joinpath(f"{name}.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    directory.joinpath("c.jsonl").write_text("\n \n")
    return JsonLines(directory)


TEXTS = [{"text": record["text"], "path": f"{number:02}.txt"} for number, record in enumerate(RECORDS)]
CASES: dict[str, tuple[Callable[[Path], Source], list[Any]]] = {
    "list": (lambda _: IterableSource(RECORDS), RECORDS),
    "function": (lambda _: IterableSource(generate), RECORDS),
    "stateful": (lambda _: IterableSource(Stateful()), RECORDS),
    "stateful made": (lambda _: IterableSource(Stateful), RECORDS),
    "stateful iterator": (lambda _: IterableSource(MakesStatefulIterators()), RECORDS),
    "stateful once": (lambda _: IterableSource(StatefulIterator()), RECORDS),
    "nothing": (lambda _: IterableSource([]), []),
    "None": (lambda _: IterableSource([None, None]), [None, None]),
    "async function": (lambda _: AsyncIterableSource(generate_async), RECORDS),
    "async stateful": (lambda _: AsyncIterableSource(AsyncStateful()), RECORDS),
    "sequence": (lambda _: SequenceSource(RECORDS), RECORDS),
    "array": (lambda _: SequenceSource(np.arange(12).reshape(6, 2)), list(np.arange(12).reshape(6, 2))),
    "batched": (lambda _: SequenceSource(Batched()), RECORDS),
    "empty sequence": (lambda _: SequenceSource(()), []),
    "text files": (text_files, TEXTS),
    "json lines": (json_lines, RECORDS),
}


@pytest.mark.parametrize("case", CASES)
async def test_contract(case: str, tmp_path: Path) -> None:
    make, expected = CASES[case]
    await check_source(make(tmp_path), expected, other=make(tmp_path))


@pytest.mark.parametrize("case", CASES)
async def test_cursors_of_other_sources_are_refused(case: str, tmp_path: Path) -> None:
    await check_foreign_cursors(CASES[case][0](tmp_path))


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_span_sizes_change_nothing(case: str, tmp_path: Path, sizes: list[int]) -> None:
    make, _ = CASES[case]
    assert same(run(read_all(make(tmp_path), sizes=sizes)), run(read_all(make(tmp_path))))


@pytest.mark.parametrize("case", CASES)
async def test_a_source_travels_to_another_process(case: str, tmp_path: Path) -> None:
    source = CASES[case][0](tmp_path)
    await read_all(source)
    copy = cloudpickle.loads(cloudpickle.dumps(source))
    assert same(await read_all(copy), await read_all(source))
    assert copy.fingerprint() == source.fingerprint()


class Epochs:
    """Its order depends on the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(5))

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(5):
            yield self[index]


@pytest.mark.parametrize("kind", [IterableSource, AsyncIterableSource, SequenceSource])
async def test_the_epoch_reaches_the_upstream(kind: Callable[[Epochs], Source]) -> None:
    source = kind(Epochs())
    for epoch in (0, 3, 1, 3):
        found = await read_all(source, epoch=epoch)
        assert [record for _, record in found] == [100 * epoch + index for index in range(5)]


def test_importing_sources_is_light() -> None:
    probe = "import aioloader.sources, sys; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert not {"torch", "datasets", "pyarrow", "pandas", "aioloader_adapters"} & set(eval(done.stdout))
