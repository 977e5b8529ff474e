"""What a preprocess function may be and may return."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioloader import FixedBatch, Loader, PreprocessError
from tests.contract.cases import INLINE, PROCESSES, ROOT, THREADS, Options, as_list, collate, drain, name_of, numbers

HOSTS = pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=name_of)


@HOSTS
def test_none_filters_and_a_list_is_many(options: Options) -> None:
    def divide(number: int) -> Any:
        return None if number % 4 == 0 else [number * 10 + part for part in range(number % 4)] if number % 4 != 2 else []

    with Loader(range(12), preprocess=divide, batch=FixedBatch(2), collate=collate, **options) as loader:
        batches = list(loader)
        counts = loader.stats()["records"]
    assert numbers(batches) == [10, 30, 31, 32, 50, 70, 71, 72, 90, 110, 111, 112]
    assert [(sample.row, sample.seq, sample.sub) for batch in batches for sample in batch.samples] == [
        (row, row, part) for row in range(12) if row % 2 for part in range(row % 4)
    ]
    assert {sample.shard for batch in batches for sample in batch.samples} == {"sequence"}
    assert (counts["records"], counts["filtered_records"], counts["samples"], counts["delivered_samples"]) == (12, 6, 12, 12)


@HOSTS
def test_none_is_a_legal_value_inside_records_and_samples(options: Options) -> None:
    records = [{"text": None, "number": number} for number in range(4)]
    with Loader(records, preprocess=lambda record: {**record, "more": [None]}, batch=FixedBatch(4), collate=as_list, **options) as loader:
        (batch,) = loader
    assert batch["samples"] == [{"text": None, "number": number, "more": [None]} for number in range(4)]


@HOSTS
def test_only_plain_lists_are_many(options: Options) -> None:
    def result(number: int) -> Any:
        return [(number, number), {"a": number}, "text", np.arange(number), False, 0][number]

    with Loader(range(6), preprocess=result, batch=FixedBatch(6), collate=as_list, **options) as loader:
        (batch,) = loader
    samples = batch["samples"]
    assert samples[:3] == [(0, 0), {"a": 1}, "text"]
    assert samples[3].tolist() == [0, 1, 2]
    assert samples[4] is False
    assert samples[5] == 0


@HOSTS
def test_columns(options: Options) -> None:
    def split(columns: dict[str, list[Any]]) -> Any:
        (number,) = columns["number"]
        return [
            {"part": [number, number + 0.5], "of": ["x", None]},
            {},
            None,
            {"part": [], "of": []},
            {"part": (number,), "of": ("y",)},
            {"part": np.array([number]), "of": ["z"]},
        ][number]

    records = [{"number": number, "other": None} for number in range(6)]
    with Loader(records, preprocess=split, batched=True, batch=FixedBatch(4), collate=as_list, **options) as loader:
        (batch,) = loader
        assert loader.stats()["records"]["filtered_records"] == 3
    assert batch["samples"] == [{"part": 0, "of": "x"}, {"part": 0.5, "of": None}, {"part": 4, "of": "y"}, {"part": 5, "of": "z"}]
    assert [(sample.row, sample.sub) for sample in batch.samples] == [(0, 0), (0, 1), (4, 0), (5, 0)]


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=name_of)
def test_wrong_columns_are_named(options: Options) -> None:
    def unequal(columns: dict[str, list[Any]]) -> Any:
        return {"ids": [1, 2, 3], "mask": [1, 2]}

    settings: Options = {"batched": True, "batch": FixedBatch(1), "collate": as_list, **options}
    with Loader([{"a": 1}], preprocess=unequal, **settings) as loader:
        _, error = drain(loader)
    assert type(error) is PreprocessError
    assert error.record == ("sequence", 0)
    assert "expected columns of equal length, got 'ids' has 3, 'mask' has 2; return one value" in str(error)
    with Loader([1, 2], preprocess=unequal, **settings) as loader:
        _, error = drain(loader)
    assert "expected records that are mappings, got int; use batched=False" in str(error)
    for wrong, message in (
        ([1, 2], "expected a dict of columns, got list"),
        ({"text": "three"}, "expected columns with one value per sample, got a str in 'text'"),
        ({"number": 3}, "got a int in 'number'; put the values of the samples in a list"),
    ):
        with Loader([{"a": 1}], preprocess=lambda columns, wrong=wrong: wrong, **settings) as loader:
            _, error = drain(loader)
        assert type(error) is PreprocessError
        assert message in str(error)


@HOSTS
def test_worker_init_makes_the_second_argument_once_per_worker(options: Options) -> None:
    def load() -> dict[str, Any]:
        import os
        import threading

        return {"factor": 3, "made_in": (os.getpid(), threading.get_ident()), "uses": 0}

    def use(number: int, model: dict[str, Any]) -> Any:
        model["uses"] += 1
        return number * model["factor"], model["made_in"], model["uses"]

    with Loader(range(90), preprocess=use, worker_init=load, batch=FixedBatch(1), collate=as_list, **options) as loader:
        samples = [batch["samples"][0] for batch in loader]
    assert [value for value, _, _ in samples] == [number * 3 for number in range(90)]
    uses: dict[Any, list[int]] = {}
    for _, made_in, number in samples:
        uses.setdefault(made_in, []).append(number)
    assert 1 <= len(uses) <= max(1, options["workers"])
    assert all(sorted(numbers) == list(range(1, len(numbers) + 1)) for numbers in uses.values()), "one object per worker"


class Multiply:
    """A callable object with settings of its own."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, number: int) -> int:
        return number * self.factor

    def method(self, number: int) -> int:
        return number * self.factor


def test_closures_objects_methods_and_partials() -> None:
    import functools

    offset = 5
    functions: list[Callable[[int], int]] = [lambda number: number * offset, Multiply(5), Multiply(5).method, functools.partial(pow, exp=1)]
    for function, factor in zip(functions, (5, 5, 5, 1), strict=True):
        with Loader(range(6), preprocess=function, batch=FixedBatch(3), collate=lambda samples: collate(samples), **PROCESSES) as loader:
            assert numbers(loader) == [number * factor for number in range(6)]


MAIN_PROGRAM = """
from dataclasses import dataclass
from random import random

from aioloader import FixedBatch, Loader

print("started")
FACTOR = 7


@dataclass
class Sample:
    number: int


def preprocess(number):
    return Sample(number * FACTOR)


def collate(samples):
    return {"x": [sample.number for sample in samples], "samples": samples}


with Loader(range(6), preprocess=preprocess, batch=FixedBatch(3), collate=collate, workers=2) as loader:
    for batch in loader:
        print(batch["x"], all(type(sample) is Sample for sample in batch["samples"]))
"""


@pytest.mark.timeout(60)
def test_functions_and_classes_of_a_main_module_without_a_guard(tmp_path: Path) -> None:
    """`python train.py`, `python -c program`, `python - < program`, side by side."""
    script = tmp_path / "train.py"
    script.write_text(MAIN_PROGRAM)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    ways = (["train.py"], ["-c", MAIN_PROGRAM], ["-"])
    programs = [subprocess.Popen([sys.executable, *(str(script) if part == "train.py" else part for part in way)], **pipes) for way in ways]
    for way, program in zip(ways, programs, strict=True):
        output, errors = program.communicate(MAIN_PROGRAM if way == ["-"] else "", timeout=50)
        assert errors == "", way
        assert output.splitlines() == ["started", "[0, 7, 14] True", "[21, 28, 35] True"], way
