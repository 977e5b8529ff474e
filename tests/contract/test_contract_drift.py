"""A lane whose records give more than those of others gets ahead without end: what it is ahead neither fills the memory nor is lost."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioloader import FixedBatch, Loader, PreprocessError, TokenBudget
from tests.contract.cases import EVERY_HOST, INLINE, PROCESSES, THREAD_HOST, THREADS, Options, all_facts, facts, name_of, run_script

NUM_RECORDS = 600
BUFFER = 24


def many_of_every_second(number: int) -> list[dict[str, Any]]:
    """Records of one of two lanes give five samples, those of the other one."""
    return [{"input_ids": np.arange(number, number + 3 + sub)} for sub in range(5 if number % 2 else 1)]


def fails_late(number: int) -> list[dict[str, Any]]:
    if number == 301:
        raise ValueError("record 301 is bad")
    return many_of_every_second(number)


def pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
    width = max(len(sample["input_ids"]) for sample in samples)
    return {"input_ids": np.stack([np.pad(sample["input_ids"], (0, width - len(sample["input_ids"]))) for sample in samples])}


def make(options: Options, **changed: Any) -> Loader:
    defaults: dict[str, Any] = {"preprocess": many_of_every_second, "batch": FixedBatch(3), "collate": pad, "lanes": 2}
    return Loader(range(NUM_RECORDS), **{**defaults, "buffer_size": BUFFER, **options, **changed})


@pytest.mark.parametrize("options", [PROCESSES, THREAD_HOST, THREADS], ids=name_of)
@pytest.mark.parametrize("end", ["drop", "pad"])
def test_what_waits_on_disk_is_delivered_in_its_turn(options: Options, end: str) -> None:
    with make(INLINE, end=end) as loader:
        expected = all_facts(loader)
    with make(options, end=end) as loader:
        found = all_facts(loader)
        stats = loader.stats()
        assert stats["stored_batches"] > 100
        assert stats["stored_bytes"] == 0
        assert stats["peak_in_flight"] <= BUFFER
        assert stats["in_flight"] == 0
    assert found == expected
    assert len(expected) == (200 if end == "drop" else 1000)


def test_another_batching_and_a_second_pass() -> None:
    def passes(options: Options) -> Any:
        with make(options, batch=TokenBudget(20), epochs=2) as loader:
            return [all_facts(loader) for _ in range(2)]

    assert passes(PROCESSES) == passes(INLINE)


@pytest.mark.parametrize("name", [name for name in EVERY_HOST if name != "inline"])
def test_all_before_a_failure_is_delivered(name: str) -> None:
    def run(options: Options) -> Any:
        found: list[Any] = []
        with make(options, preprocess=fails_late) as loader, pytest.raises(PreprocessError, match="record 301 is bad"):
            found.extend(map(facts, loader))
        return found

    expected = run(INLINE)
    assert len(expected) > 100
    assert run(EVERY_HOST[name]) == expected


@pytest.mark.parametrize("after", [1, 37, 150])
def test_a_resume_goes_on_where_both_lanes_stood(after: int) -> None:
    with make(INLINE) as loader:
        expected = all_facts(loader)
    with make(PROCESSES) as loader:
        iterator = iter(loader)
        found = all_facts(next(iterator) for _ in range(after))
        state = json.loads(json.dumps(loader.state_dict()))
        iterator.close()
        loader.load_state_dict(state)
        found += all_facts(loader)
    assert found == expected


def test_bytes_count_as_well_as_records() -> None:
    with make(PROCESSES, preprocess=large_of_every_second, buffer_size=None, memory_limit="16MiB", collate=first) as loader:
        numbers = [int(batch["number"][0]) for batch in loader]
        stats = loader.stats()
    assert len(numbers) == 200
    assert stats["stored_batches"] > 100
    assert stats["peak_in_flight_bytes"] <= 20 << 20


def large_of_every_second(number: int) -> list[dict[str, Any]]:
    """150 MB by one of two lanes. The first record is a large one: from it the engine learns what to expect."""
    return [{"number": np.full(12_500, number)} for _ in range(1 if number % 2 else 5)]


def first(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"number": np.array([sample["number"][0] for sample in samples])}


@pytest.mark.parametrize("rates", [(1, 5, 3), (2, 1, 3, 1, 7)])
def test_lanes_of_several_speeds(rates: tuple[int, ...]) -> None:
    """Not only the fastest lane waits on disk."""

    def some(number: int) -> list[dict[str, Any]]:
        return [{"input_ids": np.array([number, sub])} for sub in range(rates[number % len(rates)])]

    with make(INLINE, preprocess=some, lanes=len(rates)) as loader:
        expected = all_facts(loader)
    with make(PROCESSES, preprocess=some, lanes=len(rates), buffer_size=4 * BUFFER) as loader:
        assert all_facts(loader) == expected
        assert loader.stats()["peak_in_flight"] <= 4 * BUFFER + 3, "a micro-batch more while others are being stored"


def test_what_was_stored_is_of_the_same_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process a class of the main module counts its instances, and a function is itself."""
    monkeypatch.setattr(Counted, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Counted", Counted, raising=False)
    Counted.made = 0
    with make(THREADS, preprocess=counted, collate=are_counted) as loader:
        assert all(batch["is_one"].all() for batch in loader)
        assert loader.stats()["stored_batches"] > 100
    assert Counted.made == NUM_RECORDS * 3


class Counted:
    made = 0

    def __init__(self) -> None:
        Counted.made += 1
        self.kind = Counted


def counted(number: int) -> list[Counted]:
    return [Counted() for _ in range(5 if number % 2 else 1)]


def are_counted(samples: list[Counted]) -> dict[str, Any]:
    return {"is_one": np.array([type(sample) is Counted is sample.kind for sample in samples])}


@pytest.mark.parametrize("options", [THREADS], ids=name_of)
def test_without_room_on_disk_they_stay_in_memory(
    options: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with make(INLINE) as loader:
        expected = all_facts(loader)
    with make(options) as loader:
        assert all_facts(loader) == expected
        assert loader.stats()["stored_batches"] == 0
    assert f"expected to store them in {tmp_path / 'none'}, got FileNotFoundError" in caplog.text
    assert caplog.text.count("expected to store them") == 1


def test_a_disk_that_is_full_from_the_beginning(tmp_path: Path) -> None:
    """Then there is not even a folder for temporary files."""
    script = """
        import resource, sys, tempfile
        import numpy as np
        import torch.utils.data  # looks for that folder, too
        from aioloader import FixedBatch, Loader

        def some(number):
            return [number] * (5 if number % 2 else 1)

        def collate(samples):
            return {"x": np.array(samples)}

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        tempfile.tempdir = None
        options = {"preprocess": some, "batch": FixedBatch(3), "collate": collate, "lanes": 2, "buffer_size": 24}
        with Loader(range(600), host="thread", pool="thread", workers=2, **options) as loader:
            print(sum(len(batch["x"]) for batch in loader), loader.stats()["stored_batches"])
    """
    done = run_script(script)
    assert done.stdout.split() == ["600", "0"], done.stderr
    assert "expected to store them in a temporary folder, got FileNotFoundError" in done.stderr


def test_lanes_that_stay_together_store_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with make(THREADS, preprocess=None, collate=numbers_only, lanes=8) as loader:
        assert len(list(loader)) == 200
        assert loader.stats()["stored_batches"] == 0
    assert not caplog.text


def numbers_only(samples: list[int]) -> dict[str, Any]:
    return {"number": np.array(samples)}
