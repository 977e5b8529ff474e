"""Batches in hand never change, and whatever a sample holds comes back as it was."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch

from aioloader import BatchError, FixedBatch, Loader, PreprocessError, StackCollator
from tests.contract.cases import (
    INLINE,
    PROCESSES,
    THREAD_HOST,
    THREADS,
    Options,
    ReusedBuffer,
    as_list,
    large,
    name_of,
    photo,
    photo_of_another_shape,
    photo_or_two,
    photo_then_trouble,
    some_photos,
    stack,
    zoo,
)
from tests.contract.footprint import mapped_files, mapping_at

HOSTS = pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=name_of)


@HOSTS
def test_large_samples_cross_and_kept_batches_stay(options: Options) -> None:
    """1 MB each; more batches are kept than wait at any time, and looked at again after close."""
    with Loader(range(30), preprocess=large, batch=FixedBatch(2), collate=stack, buffer_size=8, **options) as loader:
        kept = []
        for batch in loader:
            assert batch["image"].shape == (2, 512, 512)
            kept.append(batch)
    for step, batch in enumerate(kept):
        assert batch["image"][0].unique().tolist() == [2 * step]
        assert batch["image"][1].unique().tolist() == [2 * step + 1]
        assert batch["small"].tolist() == [0, 1]


@HOSTS
def test_a_view_keeps_its_memory_after_its_batch_is_gone(options: Options) -> None:
    with Loader(range(100), preprocess=large, batch=FixedBatch(1), collate=stack, buffer_size=8, **options) as loader:
        views = [batch["image"][0, step : step + 1, :7] for step, batch in enumerate(loader)]
    assert [view.unique().tolist() for view in views] == [[number] for number in range(100)]


@HOSTS
def test_changing_a_batch_in_place_changes_nothing_else(options: Options) -> None:
    records = [np.full(20_000, number, np.int64) for number in range(8)]
    with Loader(records, batch=FixedBatch(1), collate=lambda samples: {"x": samples[0]}, **options) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                assert batch["x"].unique().tolist() == [number]
                batch["x"].add_(100)
                assert batch["x"].unique().tolist() == [number + 100]
    assert all((record == number).all() for number, record in enumerate(records))


@HOSTS
def test_a_collator_may_use_its_memory_again(options: Options) -> None:
    with Loader(range(40), batch=FixedBatch(2), collate=ReusedBuffer(), **options) as loader:
        kept = list(loader)
    for step, batch in enumerate(kept):
        assert batch["x"][:, -1].tolist() == batch["first"].tolist() == [2 * step, 2 * step + 1]
        assert batch["strided"].tolist() == [[2 * step] * 2, [2 * step + 1] * 2]


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in type, dtype, shape and content."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other) and one.requires_grad == other.requires_grad
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@HOSTS
def test_a_zoo_of_samples_comes_back_as_it_was(options: Options) -> None:
    """Both ways: as samples from the workers, and nested in a field from the engine."""
    with Loader(range(12), preprocess=zoo, batch=FixedBatch(6), collate=as_list, **options) as loader:
        samples = [sample for batch in loader for sample in batch["samples"]]
    for number, sample in enumerate(samples):
        expected = zoo(number)
        for name, value in expected.items():
            assert same(sample[name], value), name
        assert list(sample) == list(expected)


@pytest.mark.parametrize("is_bare", [True, False], ids=["bare", "as a field"])
def test_every_kind_of_sample_comes_back_among_its_like(is_bare: bool) -> None:
    """Samples of one kind travel another way than mixed ones; each record gives many of one kind and is a chunk of its own."""

    def many(name: str) -> list[Any]:
        values = [zoo(number)[name] for number in range(12)]
        return values if is_bare else [{"field": value} for value in values]

    names = [name for name in zoo(0) if name not in {"none", "needs_grad"}]
    options: Options = {**THREAD_HOST, "workers": 1, "buffer_size": 2}
    with Loader(
        [[name] for name in names], preprocess=lambda record: many(record[0]), batch=FixedBatch(12), collate=as_list, **options
    ) as loader:
        for name, batch in zip(names, loader, strict=True):
            assert all(map(same, batch["samples"], many(name))), name


@HOSTS
def test_fields_become_tensors(options: Options) -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        sample = zoo(samples[0])
        return {name: sample[name].detach() if name == "needs_grad" else sample[name] for name in sample}

    with Loader(range(3), batch=FixedBatch(1), collate=collate, **options) as loader:
        batches = list(loader)
    for number, batch in enumerate(batches):
        expected = zoo(number)
        assert list(batch) == list(expected)
        for name in ("bfloat16", "float16", "bool", "scalar", "empty", "transposed", "complex", "ragged"):
            assert same(batch[name], expected[name]), name
        for name in ("np_bool", "np_zero_d", "np_empty", "np_strided", "np_fortran", "read_only"):
            assert same(batch[name], torch.from_numpy(np.array(expected[name]))), name
        assert same(batch["np_big_endian"], torch.tensor([number, 2], dtype=torch.int32))
        assert same(batch["np_scalar"], torch.tensor(number, dtype=torch.float32))
        for name in ("np_text", "np_objects", "np_dates", "np_records", "text", "bytes", "number", "huge", "none", "nested", "set"):
            assert same(batch[name], expected[name]), name
        batch["read_only"].add_(1)


@pytest.mark.parametrize("options", [INLINE, THREADS, PROCESSES], ids=name_of)
def test_batches_of_very_different_sizes(options: Options) -> None:
    def sized(number: int) -> Any:
        return np.full([1, 100_000, 10, 3_000_000, 0, 8_192, 8_193][number % 7], number, np.int32)

    with Loader(range(21), preprocess=sized, batch=FixedBatch(1), collate=lambda samples: {"x": samples[0]}, **options) as loader:
        kept = list(loader)
    for number, batch in enumerate(kept):
        assert same(batch["x"], torch.from_numpy(sized(number)))


def test_moving_a_batch() -> None:
    with Loader(range(4), batch=FixedBatch(2), collate=lambda samples: {"x": np.array(samples), "names": ["a", "b"]}, **THREADS) as loader:
        batch = next(iter(loader))
        moved = batch.to("cpu")
        assert moved["x"].tolist() == [0, 1]
        assert moved["names"] == ["a", "b"]
        assert moved.samples == batch.samples
        assert moved.state() == batch.state()


# Large samples of one shape: workers write them where they will lie in the batch


def check_photos(batches: list[Any], numbers: list[int]) -> None:
    assert [number for batch in batches for number in batch["label"].tolist()] == numbers
    for batch in batches:
        for row, number in enumerate(batch["label"].tolist()):
            assert bool((batch["image"][row] == number).all())
            assert bool((batch["mask"][row] == number).all())


@HOSTS
@pytest.mark.parametrize("batch_size", [4, 7])
def test_large_samples_written_in_place_arrive_as_they_were_made(options: Options, batch_size: int) -> None:
    with Loader(range(60), preprocess=photo, batch=FixedBatch(batch_size), collate=StackCollator(), end="pad", **options) as loader:
        check_photos([*loader, *loader], [*range(60)] * 2)


@pytest.mark.parametrize("options", [THREAD_HOST, PROCESSES], ids=name_of)
def test_the_batch_of_large_samples_is_the_memory_that_workers_wrote_to(options: Options) -> None:
    """No copy is made: the trainer maps the very segment that the workers map. The first batches show how large one is."""
    with Loader(range(80), preprocess=photo, batch=FixedBatch(4), collate=StackCollator(), buffer_size=8, **options) as loader:
        kept = list(loader)  # so that no segment is used twice
        of_workers = set().union(*(mapped_files(pid) for pid in loader.stats()["worker_pids"]))
        of_batches = [{mapping_at(batch[name].data_ptr()) for name in ("image", "mask")} for batch in kept]
    check_photos(kept, list(range(80)))
    assert all(len(segments) == 1 for segments in of_batches)
    in_place = [segments <= of_workers for segments in of_batches]
    assert in_place[:1] == [False]
    assert all(in_place[6:]), in_place


@HOSTS
def test_large_samples_of_which_some_are_filtered_or_doubled(options: Options) -> None:
    for function, numbers in (
        (some_photos, [number for number in range(60) if number % 7]),
        (photo_or_two, [entry for number in range(60) for entry in ([number] if number % 11 else [number, -number])]),
    ):
        with Loader(range(60), preprocess=function, batch=FixedBatch(4), collate=StackCollator(), end="pad", **options) as loader:
            check_photos(list(loader), numbers)


@HOSTS
def test_a_large_sample_of_another_shape_is_named_and_those_before_arrive(options: Options) -> None:
    with Loader(range(60), preprocess=photo_of_another_shape, batch=FixedBatch(4), collate=StackCollator(), **options) as loader:
        batches: list[Any] = []
        with pytest.raises(BatchError, match=r"StackCollator\['image'\]: expected ndarray int32\[3, 300, 300\].* int32\[300, 3, 300\]"):
            batches.extend(loader)  # keeps what came before
        check_photos(batches, list(range(len(batches) * 4)))


def test_workers_that_are_killed_while_they_write_in_place() -> None:
    killer = random.Random(3)
    with Loader(
        range(600), preprocess=photo, batch=FixedBatch(4), collate=StackCollator(), max_restarts_per_minute=1000, **PROCESSES
    ) as loader:
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) % 15 == 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(killer.choice(loader.stats()["worker_pids"]), signal.SIGKILL)
        assert loader.stats()["worker_restarts"] > 3
    check_photos(batches, list(range(600)))


def test_a_pass_left_while_workers_write_does_not_disturb_the_next() -> None:
    with Loader(range(80), preprocess=photo, batch=FixedBatch(4), collate=StackCollator(), **PROCESSES) as loader:
        for stop in (1, 6):
            kept = []
            for batch in loader:
                kept.append(batch)
                if len(kept) == stop:
                    break
            check_photos(kept, list(range(4 * stop)))
        check_photos(list(loader), list(range(80)))
        check_photos(kept, list(range(24)))


def soft(number: int) -> Any:
    return {
        "labels": torch.full((400, 1000), number + 0.5, dtype=torch.bfloat16),
        "attention_mask": torch.full((400, 1000), number % 2 == 0),
    }


@HOSTS
def test_fields_that_are_counted_are_no_different_from_others(options: Options) -> None:
    """They are looked at on the way, and arrive in their own dtype all the same."""
    with Loader(range(12), preprocess=soft, batch=FixedBatch(4), collate=StackCollator(), **options) as loader:
        for step, batch in enumerate(loader):
            assert (batch["labels"].dtype, batch["attention_mask"].dtype) == (torch.bfloat16, torch.bool)
            assert batch["labels"][:, 0, 0].tolist() == [4 * step + row + 0.5 for row in range(4)]
            assert (batch.num_tokens, batch.num_padding, batch.num_targets) == (800_000, 800_000, 1_600_000)


def test_a_partial_batch_before_a_failure_is_not_written_to_any_more() -> None:
    with Loader(
        range(80), preprocess=photo_then_trouble, batch=FixedBatch(4), collate=StackCollator(), buffer_size=8, **PROCESSES
    ) as loader:
        batches: list[Any] = []
        with pytest.raises(PreprocessError, match="bad"):
            batches.extend(loader)
        time.sleep(0.6)
        check_photos(batches, list(range(42)))
        for batch in batches:
            assert batch["tail"][:, 0].tolist() == batch["tail"][:, -1].tolist() == batch["label"].tolist()


def test_bytes_of_workers_that_died_are_not_counted_for_ever() -> None:
    with Loader(range(300), preprocess=large, batch=FixedBatch(2), collate=stack, max_restarts_per_minute=1000, **PROCESSES) as loader:
        for step, _ in enumerate(loader):
            if step % 20 == 5:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(loader.stats()["worker_pids"][0], signal.SIGKILL)
        assert loader.stats()["worker_restarts"] > 3
        assert loader.stats()["in_flight_bytes"] < 3 << 20
