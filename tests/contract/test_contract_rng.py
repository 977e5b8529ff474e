"""Random numbers belong to the record: the same with any number of workers and after any resume."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from aioloader import FixedBatch, Loader, record_rng
from tests.contract.cases import (
    EVERY_HOST,
    INLINE,
    PROCESSES,
    ROOT,
    THREAD_HOST,
    Options,
    as_list,
    draw,
    draw_numpy,
    draw_torch,
    name_of,
    run_script,
)

GLOBAL_HOSTS: list[Options] = [
    INLINE,
    {**THREAD_HOST, "workers": 1},
    {**PROCESSES, "workers": 2},
    {**PROCESSES, "workers": 4, "buffer_size": 5},
]
"""Where the global generators belong to the record: threads share them, and have `record_rng` instead."""


def draws(loader: Loader) -> list[Any]:
    return [sample for batch in loader for sample in batch["samples"]]


def make(preprocess: Any, **options: Any) -> Loader:
    return Loader(range(64), preprocess=preprocess, **{"batch": FixedBatch(4), "collate": as_list, "seed": 11, **options})


@pytest.fixture(scope="module")
def two_epochs() -> list[list[Any]]:
    with make(draw, **INLINE) as loader:
        return [draws(loader), draws(loader)]


@pytest.mark.parametrize("options", GLOBAL_HOSTS[1:], ids=name_of)
def test_any_number_of_workers_draws_the_same(options: Options, two_epochs: list[list[Any]]) -> None:
    with make(draw, **options) as loader:
        assert [draws(loader), draws(loader)] == two_epochs


def test_records_epochs_and_seeds_differ(two_epochs: list[list[Any]]) -> None:
    """K57."""
    first, second = two_epochs
    with make(draw, **INLINE, **{"seed": 12}) as loader:
        other_seed = draws(loader)
    for name in ("random", "gauss", "numpy", "own"):
        values = [sample[name] for samples in (first, second, other_seed) for sample in samples]
        assert len(set(values)) == 3 * 64, name


def test_torch_draws_the_same_too() -> None:
    results = []
    for options in (INLINE, {**PROCESSES, "workers": 2}):
        with make(draw_torch, **options) as loader:
            results.append([draws(loader), draws(loader)])
    assert results[0] == results[1]
    assert len({value for samples in results[0] for value in samples}) == 128


def test_workers_do_not_inherit_one_numpy_state() -> None:
    """K57."""
    with make(draw_numpy, **{**PROCESSES, "workers": 4}) as loader:
        values = [sample["numpy"] for sample in draws(loader) + draws(loader)]
    assert len(set(values)) == 128


@pytest.mark.parametrize("options", [INLINE, PROCESSES], ids=name_of)
def test_a_resumed_run_draws_what_the_first_would_have_drawn(options: Options, two_epochs: list[list[Any]]) -> None:
    """K56."""
    with make(draw, **INLINE) as loader:
        state = json.loads(json.dumps(list(itertools.islice(loader, 11))[-1].state()))
    with make(draw, **options) as loader:
        loader.load_state_dict(state)
        assert draws(loader) == two_epochs[0][44:]
        assert draws(loader) == two_epochs[1]


@pytest.mark.parametrize("options", EVERY_HOST.values(), ids=EVERY_HOST)
def test_record_rng_is_the_same_in_every_pool(options: Options, two_epochs: list[list[Any]]) -> None:
    with make(lambda number: int(record_rng().integers(2**31)), **options) as loader:
        assert draws(loader) == [sample["own"] for sample in two_epochs[0]]


def test_record_rng_outside_of_a_record() -> None:
    with pytest.raises(RuntimeError, match="record_rng: expected to be called inside a preprocess function"):
        record_rng()


@pytest.mark.parametrize("options", EVERY_HOST.values(), ids=EVERY_HOST)
def test_the_trainers_generators_are_not_touched(options: Options) -> None:
    def init() -> float:
        return random.random() + np.random.random()

    def use(number: int, offset: float) -> Any:
        return [random.random(), np.random.random(), offset]

    def collate(samples: list[Any]) -> Any:
        return as_list(samples)

    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    expected = [random.random(), np.random.random(), torch.rand(1).item()]
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    with make(
        use if options["workers"] == 0 or options["pool"] == "process" else lambda number, offset: number, **options, worker_init=init
    ) as loader:
        draws(loader)
        iterator = iter(loader)
        next(iterator)
        iterator.close()
    if options != EVERY_HOST["threads"]:  # there `init` draws from this process's own generators
        assert [random.random(), np.random.random(), torch.rand(1).item()] == expected


def test_what_worker_init_draws_changes_no_record() -> None:
    """Which record a worker begins with depends on timing."""

    def init() -> list[float]:
        return [random.random(), np.random.random()]

    def use(number: int, table: list[float]) -> Any:
        return (number, table, random.random(), np.random.random())

    results = []
    for options in (INLINE, {**THREAD_HOST, "workers": 1}, {**PROCESSES, "workers": 3}):
        with make(use, **options, worker_init=init) as loader:
            results.append(draws(loader))
    assert results[0] == results[1] == results[2]
    assert len({sample[2] for sample in results[0]}) == 64


MAIN_PROGRAM = """
    import sys
    from random import random
    from numpy.random import rand
    from aioloader import FixedBatch, Loader

    def run(workers):
        with Loader(range(12), preprocess=lambda number: (random(), float(rand())), batch=FixedBatch(3), seed=5,
                    collate=lambda samples: {"samples": samples}, workers=workers) as loader:
            return [sample for batch in loader for sample in batch["samples"]]

    results = [run(workers) for workers in (0, 1, 2)]
    print(results[0] == results[1] == results[2], len(set(results[0])))
"""


@pytest.mark.timeout(60)
def test_generators_imported_by_name_into_the_main_module() -> None:
    done = run_script(MAIN_PROGRAM)
    assert (done.stdout, done.stderr) == ("True 12\n", ""), ROOT
