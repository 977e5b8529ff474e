"""What is delivered depends on data, seed and configuration only."""

from __future__ import annotations

import os
from typing import Any

import pytest

from aioloader import FixedBatch, Loader, Pack, PretrainCollator
from tests.contract.cases import (
    INLINE,
    PROCESSES,
    SIDECAR_THREADS,
    THREAD_HOST,
    THREADS,
    Options,
    SomeOrManySlowly,
    all_facts,
    collate,
    documents,
    name_of,
    numbers,
    run_script,
    some_or_many,
)

NUM_RECORDS = 1_000

SETTINGS: list[Options] = [
    {**INLINE, "buffer_size": 7},
    *({**THREADS, "workers": workers} for workers in (1, 2, 4)),
    *({**PROCESSES, "workers": workers} for workers in (1, 2, 4)),
    {**PROCESSES, "buffer_size": 5, "prefetch_batches": 1},
    {**THREAD_HOST, "buffer_size": 300},
    SIDECAR_THREADS,
]


def packing() -> Options:
    return {"batch": Pack(32, rows=2), "collate": PretrainCollator(), "end": "pad", "seed": 7}


@pytest.fixture(scope="module")
def reference() -> list[tuple[Any, ...]]:
    """Return what is delivered without delays, in one thread."""
    with Loader(documents(NUM_RECORDS), preprocess=some_or_many, **packing(), **INLINE) as loader:
        return all_facts(loader)


@pytest.mark.parametrize("options", SETTINGS, ids=name_of)
def test_random_delays_change_nothing(options: Options, reference: list[tuple[Any, ...]]) -> None:
    with Loader(documents(NUM_RECORDS), preprocess=SomeOrManySlowly(), **packing(), **options) as loader:
        batches = list(loader)
    assert all_facts(batches) == reference
    rows = [sample.row for batch in batches for sample in batch.samples]
    assert rows == sorted(rows)
    assert set(rows) == {number for number in range(NUM_RECORDS) if number % 7 != 3}


def test_four_workers_with_a_regular_delay_keep_the_order() -> None:
    def slowly(number: int) -> int:
        import time

        time.sleep(7 * number % 11 / 1000)
        return number

    with Loader(range(200), preprocess=slowly, batch=FixedBatch(8), collate=collate, **{**PROCESSES, "workers": 4}) as loader:
        assert numbers(loader) == list(range(200))


def test_records_that_are_cut_into_chunks_in_another_way_give_the_same() -> None:
    """Cheap records travel by the hundred, dear ones alone."""

    def burst(number: int) -> int:
        import time

        time.sleep(0.02 if number % 400 == 399 else 0)
        return number * 3

    with Loader(range(1_200), preprocess=burst, batch=FixedBatch(50), collate=collate, **PROCESSES) as loader:
        assert numbers(loader) == [number * 3 for number in range(1_200)]


HASH_SEED_SCRIPT = """
    import hashlib
    from aioloader import Loader, Pack, PretrainCollator
    from tests.contract.cases import all_facts, documents, some_or_many

    words = {"a", "b", "c", "d"}
    options = dict(batch=Pack(32, rows=2), collate=PretrainCollator(), workers=2, seed=7)
    with Loader(documents(200), preprocess=lambda record: some_or_many(record) if "a" in {"a", "b", "c"} else None, **options) as loader:
        print(hashlib.sha256(repr(all_facts(loader)).encode()).hexdigest(), list(words))
"""


@pytest.mark.timeout(90)
def test_the_hash_seed_changes_nothing() -> None:
    done = [run_script(HASH_SEED_SCRIPT, env={**os.environ, "PYTHONHASHSEED": seed}, timeout_s=60) for seed in ("1", "3")]
    assert [one.stderr for one in done] == ["", ""]
    (digest, _, order), (other_digest, _, other_order) = (one.stdout.partition(" ") for one in done)
    assert order != other_order, "the seeds must differ in effect"
    assert digest == other_digest
