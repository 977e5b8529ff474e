"""The channel: a micro-batch crosses with every bit, its memory comes back, and the engine never runs too far ahead."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import wait_all_tasks_blocked

from aioloader.engine.channel import BATCH, Delivered, Outbox, decode_batch
from aioloader.engine.output import Ready, TensorArray, to_arrays
from aioloader.errors import BatchError
from aioloader.runtime.budget import Budget
from aioloader.runtime.segments import SegmentViews
from aioloader.runtime.wire import Frame, Wire
from aioloader.testing.leaks import resources

INLINE_BYTES = 1 << 15
SEGMENT_BYTES = 300_000


class Ends:
    """Both ends of a channel: `outbox` of the engine, and what the trainer does with its frames."""

    def __init__(self, prefetch_batches: int = 2) -> None:
        ours, theirs = socket.socketpair()
        self.engine, self.trainer = Wire(ours), Wire(theirs)
        self.outbox = Outbox(self.engine, prefetch_batches)
        self.views = SegmentViews()
        self.returned: list[int] = []

    def take(self, *, copy: bool = False) -> Delivered:
        frame = self.trainer.receive(5)
        assert frame is not None
        assert frame.kind == BATCH
        return decode_batch(frame, self.views, self.returned.append, copy=copy)

    def give_back(self, num_taken: int = 1) -> None:
        returned = self.returned[:]
        del self.returned[: len(returned)]
        self.outbox.take_back(num_taken, returned)

    def close(self) -> None:
        self.outbox.close()
        self.views.close()
        self.engine.close()
        self.trainer.close()


@contextlib.contextmanager
def channel(prefetch_batches: int = 2) -> Iterator[Ends]:
    ends = Ends(prefetch_batches)
    try:
        yield ends
    finally:
        ends.close()


def ready(fields: dict[str, Any], *, step: int = 1, num_records: int = 3) -> Ready:
    return Ready(
        fields=to_arrays(fields),
        step=step,
        lane=2,
        epoch=4,
        num_tokens=10,
        num_padding=5,
        num_targets=7,
        records=[(("shard", 8), 4, 0), (("shard", 9), 5, 1)],
        state={"position": step, "nested": [1, None]},
        num_records=num_records,
    )


ARRAYS: dict[str, Any] = {
    "int": np.arange(7),
    "bool": np.array([True, False]),
    "zero-d": np.array(2.5),
    "empty": np.zeros((0, 3), np.int16),
    "transposed": np.arange(6).reshape(2, 3).T,
    "strided": np.arange(10)[::3],
    "negative": np.arange(10)[::-1],
    "big-endian": np.arange(3, dtype=">i4"),
    "complex": np.array([1 + 2j]),
    "read-only": np.frombuffer(b"12345678", np.int32),
    "empty at the end": np.zeros(0),
}
OTHERS: dict[str, Any] = {"text": ["a", "b"], "none": None, "names": np.array(["x", "yz"]), "objects": np.array([{1}, None], object)}


@pytest.mark.parametrize("padding", [0, 1, INLINE_BYTES, SEGMENT_BYTES])
@pytest.mark.parametrize("copy", [False, True])
async def test_a_batch_arrives_as_it_was_sent(padding: int, copy: bool) -> None:
    fields = {"padding": np.full(padding, 7, np.uint8), **ARRAYS, **OTHERS}
    with channel() as ends:
        await ends.outbox.put(ready(fields))
        batch = ends.take(copy=copy)
        assert list(batch.fields) == list(fields)
        for name, value in fields.items():
            got = batch.fields[name]
            if name in OTHERS:
                assert type(got) is type(value)
                assert np.array_equal(got, value) if isinstance(value, np.ndarray) else got == value
                continue
            assert isinstance(got, TensorArray)
            assert got.dtype == str(value.dtype.newbyteorder("="))
            assert got.array.shape == value.shape
            assert np.array_equal(got.array, value)
            assert got.array.flags.writeable
            assert got.array.flags.c_contiguous
        assert (batch.step, batch.lane, batch.epoch) == (1, 2, 4)
        assert (batch.num_tokens, batch.num_padding, batch.num_targets) == (10, 5, 7)
        assert batch.records() == [(("shard", 8), 4, 0), (("shard", 9), 5, 1)]
        assert batch.state() == {"position": 1, "nested": [1, None]}
        batch.state()["nested"].append("changed")
        assert batch.state() == {"position": 1, "nested": [1, None]}


async def test_arrays_do_not_overlap() -> None:
    with channel() as ends:
        await ends.outbox.put(ready({str(number): np.full(number * 1000, number, np.uint8) for number in range(20)}))
        batch = ends.take()
        for number in range(20):
            batch.fields[str(number)].array[:] = 100 + number
        assert all((batch.fields[str(number)].array == 100 + number).all() for number in range(20))


async def test_bfloat16_arrives_by_its_bits() -> None:
    torch = pytest.importorskip("torch")
    with channel() as ends:
        tensor = torch.randn(5, 3).to(torch.bfloat16)
        await ends.outbox.put(ready({"x": tensor}))
        field = ends.take().fields["x"]
        assert field.dtype == "bfloat16"
        assert torch.equal(torch.from_numpy(field.array).view(torch.bfloat16), tensor)


async def test_memory_is_reused_only_when_the_last_view_is_gone() -> None:
    with channel(prefetch_batches=9) as ends:
        held = []
        for step in range(3):
            await ends.outbox.put(ready({"x": np.full(SEGMENT_BYTES, step, np.uint8)}, step=step))
            held.append(ends.take().fields["x"].array[5:10])
            ends.give_back()
        assert [view.tolist() for view in held] == [[0] * 5, [1] * 5, [2] * 5]
        assert ends.returned == []
        del held[1]
        ends.give_back(0)
        await ends.outbox.put(ready({"x": np.full(SEGMENT_BYTES, 3, np.uint8)}, step=3))
        held.append(ends.take().fields["x"].array[5:10])
        assert [view.tolist() for view in held] == [[0] * 5, [2] * 5, [3] * 5]
        assert len(ends.views) == 3


async def test_memory_and_descriptors_stay_bounded() -> None:
    with channel(prefetch_batches=9) as ends:
        counts = []
        for step in range(50):
            await ends.outbox.put(ready({"x": np.full(SEGMENT_BYTES * (1 + step % 3), step, np.uint8)}, step=step))
            batch = ends.take()
            assert (batch.fields["x"].array == step).all()
            del batch
            ends.give_back()
            counts.append(len(resources().descriptors))
        assert max(counts[10:]) == max(counts[:10])
        assert len(ends.views) <= 3


async def test_a_copy_gives_its_memory_back_at_once() -> None:
    with channel() as ends:
        await ends.outbox.put(ready({"x": np.full(SEGMENT_BYTES, 7, np.uint8)}))
        batch = ends.take(copy=True)
        assert len(ends.returned) == 1
        ends.give_back()
        await ends.outbox.put(ready({"x": np.full(SEGMENT_BYTES, 8, np.uint8)}))
        assert (ends.take().fields["x"].array == 8).all()
        assert (batch.fields["x"].array == 7).all()


async def test_batches_in_hand_outlive_the_channel() -> None:
    with channel() as ends:
        await ends.outbox.put(ready({"x": np.full(SEGMENT_BYTES, 7, np.uint8)}))
        batch = ends.take()
    assert (batch.fields["x"].array == 7).all()


async def test_no_more_than_the_prefetched_batches_wait_for_the_trainer() -> None:
    with channel(prefetch_batches=2) as ends:
        put: list[int] = []

        async def put_all() -> None:
            for step in range(5):
                await ends.outbox.room()
                await ends.outbox.put(ready({"x": np.zeros(3)}, step=step))
                put.append(step)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put_all)
            for taken in range(5):
                await wait_all_tasks_blocked()
                assert put == list(range(min(5, taken + 2)))
                assert ends.outbox.num_waiting == len(put) - taken
                assert ends.take().step == taken
                ends.give_back()
        assert ends.outbox.num_waiting == 0


async def test_slots_come_back_with_delivery() -> None:
    with channel(prefetch_batches=9) as ends:
        budget = ends.outbox.budget = Budget(10)
        for num_records in (3, 4, 2):
            budget.slots.start(num_records)
            budget.slots.hold(num_records)
            budget.slots.complete(num_records)
            await ends.outbox.put(ready({"x": np.zeros(3)}, num_records=num_records))
        ends.outbox.take_back(1, [])
        assert budget.slots.ready == 6
        ends.outbox.take_back(2, [])
        assert budget.slots.in_flight == 0


class Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError("stays here")


@pytest.mark.parametrize("value", [threading.Lock(), Unpicklable(), (number for number in range(3))], ids=["lock", "own", "generator"])
async def test_a_field_that_cannot_move_is_an_error_in_its_place(value: Any) -> None:
    with channel() as ends:
        message = r"stage collate, record shard\[8\], seq 4, lane 2: .*fields \['bad'\] of micro-batch 6"
        with pytest.raises(BatchError, match=message):
            await ends.outbox.put(ready({"x": np.zeros(SEGMENT_BYTES), "bad": value}, step=6))
        assert ends.outbox.num_waiting == 0
        await ends.outbox.put(ready({"x": np.zeros(3)}, step=7))
        assert ends.take().step == 7


async def test_objects_that_only_this_process_knows_cross_by_value() -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    with channel() as ends:
        await ends.outbox.put(ready({"x": [Local(3)], "f": lambda: 4}))
        fields = ends.take().fields
        assert (fields["x"][0].value, fields["f"]()) == (3, 4)


async def test_retired_memory_is_forgotten_by_the_trainer() -> None:
    with channel(prefetch_batches=100) as ends:
        ends.outbox._arena._max_free_bytes = 1
        held = []
        for step in range(4):
            await ends.outbox.put(ready({"x": np.full(SEGMENT_BYTES, step, np.uint8)}, step=step))
            held.append(ends.take())
        held.clear()
        ends.give_back(4)
        await ends.outbox.put(ready({"x": np.zeros(3)}))
        ends.take()
        assert len(ends.views) == 1


def test_a_frame_is_plain_pickle_and_bytes() -> None:
    head = (1, 2, 3, 4, 5, 6)
    meta = pickle.dumps((head, ["x"], [("x", "int8", "|i1", (2,), 0)], pickle.dumps({}), pickle.dumps([]), pickle.dumps({}), None, []))
    frame = Frame(BATCH, bytearray(meta), memoryview(bytearray(b"\1\2")), ())
    batch = decode_batch(frame, SegmentViews(), lambda _: None, copy=False)
    assert batch.fields["x"].array.tolist() == [1, 2]
