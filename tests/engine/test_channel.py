"""The channel: a micro-batch crosses with every bit, its memory comes back, and the engine never runs too far ahead."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import wait_all_tasks_blocked

from aioloader.engine.channel import BATCH, ERROR, Delivered
from aioloader.engine.inbox import Inbox
from aioloader.engine.layout import Field, Layout
from aioloader.engine.outbox import Outbox
from aioloader.engine.output import Ready, TensorArray, to_arrays
from aioloader.errors import BatchError, StallError
from aioloader.runtime.budget import Budget
from aioloader.runtime.moving import unpack_error
from aioloader.runtime.wire import Frame, Wire, WireClosedError
from aioloader.testing.leaks import resources

INLINE_BYTES = 1 << 13
SEGMENT_BYTES = 300_000


class Ends:
    """Both ends of a channel: `outbox` of the engine, and what the trainer does with its frames."""

    def __init__(self, prefetch_batches: int | None = 2, max_held: int = 64) -> None:
        ours, theirs = socket.socketpair()
        self.engine, self.trainer = Wire(ours), Wire(theirs)
        self.outbox = Outbox(self.engine, prefetch_batches)
        self.inbox = Inbox(max_held)

    def take(self) -> Delivered:
        if not self.inbox:
            frame = self.trainer.receive(5)
            assert frame is not None
            assert frame.kind == BATCH
            self.inbox.add(frame)
        batch = self.inbox.next()
        assert batch is not None
        return batch

    async def send(self, batch: Ready) -> None:
        """Send one micro-batch alone."""
        await self.outbox.put(batch)
        await self.outbox.flush()

    def give_back(self, num_taken: int = 1) -> list[int]:
        returned = self.inbox.take_returned()
        for number in range(num_taken):
            self.outbox.take_back(1, returned if number == 0 else [])
        if not num_taken:
            self.outbox.take_back(0, returned)
        return returned

    def close(self) -> None:
        self.outbox.close()
        self.inbox.close()
        self.engine.close()
        self.trainer.close()


@contextlib.contextmanager
def channel(prefetch_batches: int | None = 2, max_held: int = 64) -> Iterator[Ends]:
    ends = Ends(prefetch_batches, max_held)
    try:
        yield ends
    finally:
        ends.close()


def fields(batch: Delivered) -> dict[str, Any]:
    """Return the fields as the bridge finds them: arrays over the shared memory."""
    found = {field.name: TensorArray([array(batch, field)], field.torch_dtype) for field in batch.layout.arrays}
    return {name: found[name] if name in found else batch.others[name] for name in batch.layout.names}


def array(batch: Delivered, field: Field) -> Any:
    return np.ndarray(field.shape, field.dtype, batch.memory, batch.offset + field.offset)


def ready(fields: dict[str, Any], *, step: int = 1, num_records: int = 3) -> Ready:
    return Ready(
        fields=to_arrays(fields),
        step=step,
        lane=2,
        epoch=4,
        num_tokens=10,
        num_padding=5,
        num_targets=7,
        provenance=[("shard", 8, 9, 1, [4]), ([("shard", 9)], [5], [1])],
        state={"position": step, "nested": [1, None]},
        num_records=num_records,
        num_samples=2,
        cause=3,
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
    sent = {"padding": np.full(padding, 7, np.uint8), **ARRAYS, **OTHERS}
    with channel(max_held=0 if copy else 64) as ends:
        await ends.send(ready(sent))
        batch = ends.take()
        assert list(fields(batch)) == list(sent)
        for name, value in sent.items():
            got = fields(batch)[name]
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
        assert batch.head == (1, 2, 4, 2, 10, 5, 7, False, 3)
        assert batch.cause == 3
        assert batch.load_records() == [(("shard", 8), 4, 0), (("shard", 9), 5, 1)]
        assert batch.state_loader()() == {"position": 1, "nested": [1, None]}
        batch.state_loader()()["nested"].append("changed")
        assert batch.state_loader()() == {"position": 1, "nested": [1, None]}


async def test_arrays_do_not_overlap() -> None:
    with channel() as ends:
        await ends.send(ready({str(number): np.full(number * 1000, number, np.uint8) for number in range(20)}))
        batch = ends.take()
        for number in range(20):
            fields(batch)[str(number)].array[:] = 100 + number
        assert all((fields(batch)[str(number)].array == 100 + number).all() for number in range(20))


async def test_bfloat16_arrives_by_its_bits() -> None:
    torch = pytest.importorskip("torch")
    with channel() as ends:
        tensor = torch.randn(5, 3).to(torch.bfloat16)
        await ends.send(ready({"x": tensor}))
        field = fields(ends.take())["x"]
        assert field.dtype == "bfloat16"
        assert torch.equal(torch.from_numpy(field.array).view(torch.bfloat16), tensor)


async def test_memory_is_reused_only_when_the_last_view_is_gone() -> None:
    with channel(prefetch_batches=9) as ends:
        held = []
        for step in range(3):
            await ends.send(ready({"x": np.full(SEGMENT_BYTES, step, np.uint8)}, step=step))
            held.append(fields(ends.take())["x"].array[5:10])
            ends.give_back()
        assert [view.tolist() for view in held] == [[0] * 5, [1] * 5, [2] * 5]
        assert ends.give_back(0) == []
        del held[1]
        assert len(ends.give_back(0)) == 1
        await ends.send(ready({"x": np.full(SEGMENT_BYTES, 3, np.uint8)}, step=3))
        held.append(fields(ends.take())["x"].array[5:10])
        assert [view.tolist() for view in held] == [[0] * 5, [2] * 5, [3] * 5]
        assert len(ends.inbox._views) == 3


async def test_memory_and_descriptors_stay_bounded() -> None:
    with channel(prefetch_batches=9) as ends:
        counts = []
        for step in range(50):
            await ends.send(ready({"x": np.full(SEGMENT_BYTES * (1 + step % 3), step, np.uint8)}, step=step))
            batch = ends.take()
            assert (fields(batch)["x"].array == step).all()
            del batch
            ends.give_back()
            counts.append(len(resources().descriptors))
        assert max(counts[10:]) == max(counts[:10])
        assert len(ends.inbox._views) <= 3


async def test_a_copy_gives_its_memory_back_at_once() -> None:
    with channel(max_held=0) as ends:
        await ends.send(ready({"x": np.full(SEGMENT_BYTES, 7, np.uint8)}))
        batch = ends.take()
        assert len(ends.give_back()) == 1
        await ends.send(ready({"x": np.full(SEGMENT_BYTES, 8, np.uint8)}))
        assert (fields(ends.take())["x"].array == 8).all()
        assert (fields(batch)["x"].array == 7).all()


async def test_batches_in_hand_outlive_the_channel() -> None:
    with channel() as ends:
        await ends.send(ready({"x": np.full(SEGMENT_BYTES, 7, np.uint8)}))
        batch = ends.take()
    assert (fields(batch)["x"].array == 7).all()


async def test_no_more_than_the_prefetched_batches_wait_for_the_trainer() -> None:
    with channel(prefetch_batches=2) as ends:
        put: list[int] = []

        async def put_all() -> None:
            for step in range(5):
                await ends.outbox.room()
                await ends.send(ready({"x": np.zeros(3)}, step=step))
                put.append(step)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put_all)
            for taken in range(5):
                await wait_all_tasks_blocked()
                assert put == list(range(min(5, taken + 2)))
                assert ends.outbox.num_waiting == len(put) - taken
                assert ends.take().head[0] == taken
                ends.give_back()
        assert ends.outbox.num_waiting == 0


async def test_slots_come_back_with_delivery() -> None:
    with channel(prefetch_batches=9) as ends:
        budget = ends.outbox.budget = Budget(10)
        for num_records in (3, 4, 2):
            budget.slots.start(num_records)
            budget.slots.hold(num_records)
            budget.slots.complete(num_records)
            await ends.send(ready({"x": np.zeros(3)}, num_records=num_records))
        ends.outbox.take_back(1, [])
        assert budget.slots.ready == 6
        ends.outbox.take_back(2, [])
        assert (budget.slots.in_flight, ends.outbox.waiting_bytes) == (0, 0)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError("stays here")


@pytest.mark.parametrize("value", [threading.Lock(), Unpicklable(), (number for number in range(3))], ids=["lock", "own", "generator"])
async def test_a_field_that_cannot_move_is_an_error_in_its_place(value: Any) -> None:
    with channel() as ends:
        message = r"stage collate, record shard\[8\], seq 4, lane 2: .*fields \['bad'\] of micro-batch 6"
        with pytest.raises(BatchError, match=message):
            await ends.send(ready({"x": np.zeros(SEGMENT_BYTES), "bad": value}, step=6))
        assert ends.outbox.num_waiting == 0
        await ends.send(ready({"x": np.zeros(3)}, step=7))
        assert ends.take().head[0] == 7


async def test_objects_that_only_this_process_knows_cross_by_value() -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    with channel() as ends:
        await ends.send(ready({"x": [Local(3)], "f": lambda: 4}))
        got = fields(ends.take())
        assert (got["x"][0].value, got["f"]()) == (3, 4)


async def test_retired_memory_is_forgotten_by_the_trainer() -> None:
    with channel(prefetch_batches=100) as ends:
        ends.outbox._arena._max_free_bytes = 1
        held = []
        for step in range(4):
            await ends.send(ready({"x": np.full(SEGMENT_BYTES, step, np.uint8)}, step=step))
            held.append(ends.take())
        held.clear()
        ends.give_back(4)
        await ends.send(ready({"x": np.zeros(3)}))
        ends.take()
        assert len(ends.inbox._views) == 1


async def test_the_layout_is_sent_again_only_when_it_changes() -> None:
    with channel(prefetch_batches=9) as ends:
        layouts = []
        for size in (3, 3, 4, 4, 3):
            await ends.send(ready({"x": np.full(size, size)}))
            batch = ends.take()
            layouts.append(batch.layout)
            assert fields(batch)["x"].array.tolist() == [size] * size
        assert [one is two for one, two in pairwise(layouts)] == [True, False, True, False]


def test_a_frame_is_plain_pickle_and_bytes() -> None:
    head = (1, 2, 3, 4, 5, 6, 7, False, 0)
    layout = Layout(("x",), (Field("x", "int8", "|i1", (2,), 0),), 2)
    entries = [(head, known, b"", pickle.dumps([]), pickle.dumps({}), offset) for known, offset in ((layout, 0), (None, 2))]
    meta = pickle.dumps((entries, None, [], 3))
    inbox = Inbox(9)
    inbox.add(Frame(BATCH, bytearray(meta), memoryview(bytearray(b"\1\2\3\4")), ()))
    assert (len(inbox), inbox.told_every) == (2, 3)
    batches = [inbox.next() for _ in range(3)]
    assert [batch and fields(batch)["x"].array.tolist() for batch in batches] == [[1, 2], [3, 4], None]


async def test_small_batches_that_are_ready_together_go_in_one_message() -> None:
    with channel(prefetch_batches=9) as ends:
        for step in range(5):
            await ends.outbox.put(ready({"x": np.full(5000, step), "y": [step]}, step=step))
        assert ends.trainer.try_receive() is None
        assert ends.outbox.num_waiting == 5
        await ends.outbox.flush()
        got = [ends.take() for _ in range(5)]
        assert ends.trainer.try_receive() is None
        assert [(batch.head[0], int(fields(batch)["x"].array.max()), batch.others["y"]) for batch in got] == [(n, n, [n]) for n in range(5)]
        assert [batch.state_loader()()["position"] for batch in got] == list(range(5))
        await ends.outbox.flush()
        assert ends.trainer.try_receive() is None


@pytest.mark.parametrize("nbytes", [100, 16_000])
async def test_a_batch_that_is_kept_keeps_no_others(nbytes: int) -> None:
    """Neither those of a small message, nor those of a segment that is one too many to be held."""
    with channel(prefetch_batches=9, max_held=0) as ends:
        for step in range(4):
            await ends.outbox.put(ready({"x": np.full(nbytes, step, np.uint8)}, step=step))
        await ends.outbox.flush()
        batches = [ends.take() for _ in range(4)]
        owners = [batch.memory.obj for batch in batches]
        assert [len(owner) for owner in owners] == [-(-nbytes // 64) * 64] * 4
        assert [fields(batch)["x"].array.tolist() for batch in batches] == [[step] * nbytes for step in range(4)]
        assert len(ends.give_back(0)) == (nbytes > INLINE_BYTES // 4)


@pytest.mark.parametrize(("max_free_bytes", "limit"), [(1 << 28, 16), (1 << 20, 8), (1 << 17, 2)])
async def test_a_small_memory_limit_lets_fewer_batches_wait(max_free_bytes: int, limit: int) -> None:
    with channel(prefetch_batches=None) as ends:
        outbox = Outbox(ends.engine, None, max_free_bytes=max_free_bytes)
        num_put = 0
        while outbox.has_room:
            await outbox.put(ready({"x": np.zeros(16_384, np.uint8)}))
            num_put += 1
        assert num_put == limit
        assert outbox.headroom_bytes == max(16_384, min(1 << 20, max_free_bytes // 8))
        outbox.close()


@pytest.mark.parametrize("nbytes", [0, 1, 1000, INLINE_BYTES // 4, INLINE_BYTES // 4 + 1, INLINE_BYTES, 50_000, 1 << 18, 1 << 20])
async def test_batches_of_every_size_arrive_in_order_however_they_are_put_together(nbytes: int) -> None:
    with channel(prefetch_batches=100) as ends:
        for step in range(40):
            await ends.outbox.put(ready({"x": np.full(nbytes + 70 * (step % 7 == 3), step % 100, np.uint8)}, step=step))
            if step % 11 == 5:
                await ends.outbox.flush()
        await ends.outbox.flush()
        for step in range(40):
            batch = ends.take()
            assert batch.head[0] == step
            assert (fields(batch)["x"].array == step % 100).all()
            assert fields(batch)["x"].array.size == nbytes + 70 * (step % 7 == 3)
            del batch
            ends.give_back()
        assert ends.outbox.num_waiting == ends.outbox.waiting_bytes == 0


async def test_memory_of_a_message_is_reused_only_when_its_last_batch_is_gone() -> None:
    with channel(prefetch_batches=9) as ends:
        for step in range(3):
            await ends.outbox.put(ready({"x": np.full(50_000, step, np.uint8)}, step=step))
        await ends.outbox.flush()
        held = [ends.take() for _ in range(3)]
        view = fields(held[1])["x"].array[5:8]
        held.clear()
        assert ends.give_back() == []
        await ends.send(ready({"x": np.full(50_000, 9, np.uint8)}))
        assert (fields(ends.take())["x"].array == 9).all()
        assert view.tolist() == [1, 1, 1]
        del view
        assert len(ends.give_back()) == 2


async def test_a_batch_that_cannot_move_leaves_those_before_it_as_they_are() -> None:
    with channel(prefetch_batches=9) as ends:
        await ends.outbox.put(ready({"x": np.full(9, 3)}, step=5))
        with pytest.raises(BatchError):
            await ends.outbox.put(ready({"x": threading.Lock()}, step=6))
        await ends.outbox.put(ready({"x": np.full(9, 4)}, step=7))
        await ends.outbox.flush()
        assert [(batch.head[0], fields(batch)["x"].array.max()) for batch in (ends.take(), ends.take())] == [(5, 3), (7, 4)]


@pytest.mark.parametrize(
    ("nbytes", "num_records", "limit", "told_every"),
    [(100, 1, 16, 8), (100, 40, 13, 6), (100, 501, 2, 1), (1 << 17, 1, 8, 4), (1 << 20, 1, 2, 1), (1 << 22, 1, 2, 1)],
)
async def test_by_default_the_smaller_batches_are_the_more_of_them_wait(nbytes: int, num_records: int, limit: int, told_every: int) -> None:
    with channel(prefetch_batches=None) as ends:
        budget = ends.outbox.budget = Budget(1000)
        num_put = 0
        while ends.outbox.has_room:
            budget.slots.ready += num_records
            await ends.send(ready({"x": np.zeros(nbytes, np.uint8)}, num_records=num_records))
            num_put += 1
        assert num_put == limit
        for _ in range(limit):
            ends.take()
        assert ends.inbox.told_every == told_every


async def test_waiting_for_room_sends_what_is_ready() -> None:
    with channel(prefetch_batches=3) as ends:
        for step in range(3):
            await ends.outbox.put(ready({"x": np.zeros(3)}, step=step))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ends.outbox.room)
            await wait_all_tasks_blocked()
            assert [ends.take().head[0] for _ in range(3)] == [0, 1, 2]
            ends.give_back()


@pytest.mark.parametrize("nbytes", [9, 50_000], ids=["in the message", "in a segment"])
@pytest.mark.parametrize("num_sent", [0, 2])
async def test_what_waits_for_company_comes_before_the_error_that_ends_it_all(nbytes: int, num_sent: int) -> None:
    with channel(prefetch_batches=9) as ends:
        for step in range(5):
            await ends.outbox.put(ready({"x": np.full(nbytes, step, np.uint8)}, step=step))
            if step < num_sent:
                await ends.outbox.flush()
        thread = threading.Thread(target=ends.outbox.abort, args=(StallError("collate", "it hangs"),))
        thread.start()
        for step in range(5):
            batch = ends.take()
            assert (batch.head[0], fields(batch)["x"].array.tolist()) == (step, [step] * nbytes)
            del batch
        frame = ends.trainer.receive(5)
        assert frame is not None
        assert frame.kind == ERROR
        error = unpack_error(frame.meta)
        assert isinstance(error, StallError)
        assert (error.stage, str(error)) == ("collate", "it hangs")
        thread.join()
        with pytest.raises(WireClosedError, match="the other end closed"):
            ends.trainer.receive(5)
        await ends.outbox.put(ready({"x": np.zeros(9)}, step=5))
        with pytest.raises(WireClosedError, match="Broken pipe"):
            await ends.outbox.flush()


async def test_an_error_for_a_trainer_that_is_gone_is_nobodys() -> None:
    with channel() as ends:
        ends.trainer.close()
        ends.outbox.abort(StallError("collate", "it hangs"))
