"""Micro-batches that wait for another lane: their order, what stays in memory, and what comes back from the disk."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader.engine.lane import LaneBatch
from aioloader.engine.overflow import Overflow
from aioloader.engine.waiting import WaitingBatches
from aioloader.errors import HostError
from aioloader.pools.transport import decode, encode_samples, write
from aioloader.protocols import Group, Item
from aioloader.sequences import ItemRun, RaggedRows, columns_of

ELSEWHERE: Any = object()


def batch(step: int, num_records: int) -> LaneBatch:
    return LaneBatch(0, step, 0, Group((step,), (Item(step, step, 0, ("s", step)),)), {}, num_records, 1, step)


@given(actions=st.lists(st.one_of(st.integers(0, 3), st.sampled_from(["pop", "keep", "store"])), max_size=60))
def test_the_order_stays_and_what_is_in_memory_is_counted(actions: list[Any]) -> None:
    waiting, step = WaitingBatches(), 0
    expected: list[int] = []
    for action in actions:
        if isinstance(action, int):
            waiting.append(batch(step, action))
            expected.append(step)
            step += 1
        elif action == "pop" and expected:
            assert waiting.popleft().step == expected.pop(0)
        elif action == "keep":
            waiting.keep()
        elif action == "store" and (found := waiting.storable()) is not None:
            assert found.stored is None
            assert found.step != expected[0], "the very next one would come back at once"
            waiting.replace(ELSEWHERE)
            assert next(one for one in waiting if one.step == found.step).stored is not None
        held = [one for one in waiting if one.stored is None]
        assert [one.step for one in waiting] == expected
        assert waiting.num_records == sum(one.num_records for one in held)
        assert waiting.num_records_ahead == sum(one.num_records for one in list(waiting)[1:] if one.stored is None)
        assert all(not one.is_filler for one in waiting)


def test_stored_is_what_comes_back_and_the_room_is_given_back() -> None:
    overflow = Overflow(file_bytes=3000)
    groups = [Group((np.full(200, step), "x"), (Item(step, step, 0, ("s", step)),), complete=step % 2 == 0) for step in range(12)]
    stored = [overflow.store(group) for group in groups]
    assert overflow.total == 12
    assert overflow.nbytes == sum(one.nbytes for one in stored) > 12 * 1600
    assert len({id(one.file) for one in stored}) == 6
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for group, one in zip(groups, stored, strict=True):
        found = overflow.load(one)
        assert np.array_equal(found.samples[0], group.samples[0])
        assert (found.samples[1], found.items, found.complete) == ("x", group.items, group.complete)
        found.samples[0][0] = -1  # a collator may write to what it gets
    assert overflow.nbytes == 0
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before - 6
    overflow.close()


def test_a_part_of_a_chunk_takes_no_more_than_the_part() -> None:
    """Micro-batches view what a worker sent, which is many times as much."""
    samples: list[dict[str, Any]] = [{"ids": np.arange(at, at + 100 + at % 5), "row": torch.full((300,), at)} for at in range(200)]
    encoded = encode_samples(samples)
    memory = memoryview(bytearray(encoded.nbytes))
    write(encoded, memory)
    chunk = decode(encoded.sizes, memory)
    part = ItemRun(chunk, range(200), [("s", at) for at in range(200)])[50:54]
    overflow = Overflow()
    stored = overflow.store(Group(part.samples, part))
    whole = overflow.store(Group(tuple(chunk[at] for at in range(50, 54)), ()))
    assert stored.nbytes < 4 * 3500
    assert whole.nbytes < 4 * 3500
    found, loose = overflow.load(stored), overflow.load(whole)
    columns = columns_of(found.samples)
    assert columns is not None
    assert isinstance(columns["ids"], RaggedRows)
    for samples_found in (list(found.samples), loose.samples):
        for expected, sample in zip(samples[50:54], samples_found, strict=True):
            assert np.array_equal(sample["ids"], expected["ids"])
            assert torch.equal(sample["row"], expected["row"])
    assert [item.record for item in found.items] == [("s", at) for at in range(50, 54)]


def test_a_file_that_lost_its_end_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.closing(Overflow()) as overflow:
        stored = overflow.store(Group((b"x" * 1000,), ()))
        os.ftruncate(stored.file._file.fileno(), 100)
        with pytest.raises(HostError, match=rf"{tmp_path}: expected a micro-batch of {stored.nbytes} bytes .* its end after 100 bytes"):
            overflow.load(stored)
    assert not list(tmp_path.iterdir())


def test_empty_columns_move() -> None:
    rows = RaggedRows(np.arange(10), [], [], None)
    assert len(pickle.loads(pickle.dumps(rows))) == 0
