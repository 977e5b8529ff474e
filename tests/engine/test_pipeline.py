"""The running engine with a pool and a trainer made up in the test: it always gets to the end, and says why if it cannot."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from aioloader.batching import FixedBatch
from aioloader.engine import pipeline as pipeline_module
from aioloader.engine.output import Ready
from aioloader.engine.pipeline import Pipeline
from aioloader.engine.plan import Run
from aioloader.errors import AioLoaderError, SourceError
from aioloader.pools.chunk import Block, Chunk, Outcome, Quarantined
from aioloader.protocols import Cursor, Group, Item, Json, Span
from aioloader.runtime.segments import HeldBytes
from aioloader.telemetry import Stages
from tests.engine.lane_cases import Case, expected


class Ragged:
    """A source of the numbers below `size`, in spans of random lengths; fails at the end if told to."""

    def __init__(self, size: int, seed: int, error: BaseException | None = None) -> None:
        self.size = size
        self.seed = seed
        self.error = error

    def fingerprint(self) -> Mapping[str, Json]:
        return {}

    def open(self, epoch: int, cursor: Cursor | None) -> RaggedReader:
        return RaggedReader(self, cursor or 0)


class RaggedReader:
    def __init__(self, source: Ragged, position: int) -> None:
        self._source = source
        self._position = position
        self._random = random.Random(source.seed)

    def read(self, max_records: int) -> Span | None:
        start = self._position
        self._position = min(self._source.size, start + min(max_records, self._random.choice([1, 2, 3, 7, 100])))
        if start == self._position:
            if self._source.error is not None:
                raise self._source.error
            return None
        rows = range(start, self._position)
        return Span(list(rows), [("shard", row) for row in rows])

    def cursor(self) -> Cursor:
        return self._position

    def close(self) -> None:
        """Nothing is held."""


class Trainer:
    """Takes micro-batches and, some time later, gives their slots back."""

    def __init__(self, seed: int) -> None:
        self.batches: list[list[int]] = []
        self.pipeline: Pipeline | None = None
        self.num_kept = 0
        """Those of the last ones that wait for company."""
        self.most_kept = 0
        self._random = random.Random(seed)

    has_room = True
    waiting_bytes = 0
    headroom_bytes = 0
    num_waiting = 0
    num_placed = num_missed = 0

    def reserve(self, num_rows: int) -> None:
        return None

    def is_worth_it(self, num_rows: int) -> bool:
        return False

    async def room(self) -> None:
        for _ in range(self._random.randint(0, 3)):
            await anyio.lowlevel.checkpoint()

    async def put(self, ready: Ready) -> None:
        self.batches.append(ready.fields["rows"].array.tolist())
        self.num_kept += 1
        self.most_kept = max(self.most_kept, self.num_kept)
        await self.room()
        assert self.pipeline is not None
        self.pipeline.budget.slots.deliver(ready.num_records)
        self.pipeline.budget.changed()

    async def delivery(self) -> None:
        raise AssertionError("nothing ever waits")

    async def flush(self) -> None:
        self.num_kept = 0

    def abort(self, error: AioLoaderError) -> None:
        raise AssertionError(error)


class Workers:
    """A pool that gives records back out of order."""

    num_workers = 2
    capacity = 4
    held_bytes = None
    takes_destinations = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.num_running = 0

    async def run(self, chunk: Chunk) -> Block:
        self.num_running += 1
        assert self.num_running <= self.capacity
        for _ in range(self._random.randint(0, 8)):
            await anyio.lowlevel.checkpoint()
        self.num_running -= 1
        return Block(Outcome(len(chunk.records), None, chunk.records, None), "made up", self._random.random() * 0.001)

    async def stacks(self) -> dict[str, str]:
        return {}


def rows_of(samples: list[int]) -> dict[str, Any]:
    return {"rows": np.array(samples)}


def pipeline_of(case: Case, source: Ragged, buffer_size: int, seed: int) -> tuple[Pipeline, Trainer]:
    plan = replace(case.plan(0), source=source, collate=rows_of, buffer_size=buffer_size)
    trainer = Trainer(seed)
    pipeline = trainer.pipeline = Pipeline(plan, Run(state=case.fresh(0), end_epoch=case.num_epochs), Workers(seed), trainer, Stages())
    return pipeline, trainer


def case_of(num_records: int, num_lanes: int, batch_size: int, *, keep_partial: bool = False, num_epochs: int = 2) -> Case:
    return Case(
        records=[[1]] * num_records,
        num_lanes=num_lanes,
        dp_size=1,
        batching=FixedBatch(batch_size),
        keep_partial=keep_partial,
        num_epochs=num_epochs,
    )


@pytest.mark.parametrize("buffer_size", [1, 3, 8, 64])
@pytest.mark.parametrize(("num_lanes", "batch_size"), [(1, 1), (2, 32), (5, 2)])
@pytest.mark.parametrize("keep_partial", [False, True])
async def test_gets_to_the_end_whatever_the_buffer(buffer_size: int, num_lanes: int, batch_size: int, keep_partial: bool) -> None:
    """Also where a block of lanes or a step of micro-batches needs more records than the buffer holds."""
    for seed in range(2):
        case = case_of(68, num_lanes, batch_size, keep_partial=keep_partial)
        pipeline, trainer = pipeline_of(case, Ragged(68, seed), buffer_size, seed)
        with anyio.fail_after(10):
            state = await pipeline.run()
        positions = [[seq * num_lanes + lane for seq, _ in refs] for lane, _, refs, _ in expected(case, 0)]
        assert trainer.batches == positions
        slots = pipeline.budget.slots
        assert (slots.working, slots.ready) == (0, 0)
        assert slots.peak <= max(buffer_size, num_lanes * batch_size + num_lanes + buffer_size)
        assert (state["source"]["epoch"], state["end_epoch"]) == (2, None)


@pytest.mark.parametrize(
    "error", [OSError("disk"), SystemExit(3), asyncio.CancelledError("not ours"), StopIteration(), GeneratorExit()], ids=repr
)
@pytest.mark.parametrize("num_records", [0, 1, 7, 20])
async def test_a_source_that_fails_ends_the_pass_after_everything_before(error: BaseException, num_records: int) -> None:
    pipeline, trainer = pipeline_of(case_of(num_records, 1, 3), Ragged(num_records, 0, error), 5, 0)
    with anyio.fail_after(10), pytest.raises(SourceError, match=type(error).__name__):
        await pipeline.run()
    assert [row for rows in trainer.batches for row in rows] == list(range(num_records))


async def test_a_pass_that_is_left_stops_at_once() -> None:
    pipeline, trainer = pipeline_of(case_of(1000, 1, 1), Ragged(1000, 0), 4, 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        while len(trainer.batches) < 5:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert len(trainer.batches) < 1000


async def test_a_collator_that_fails_ends_the_pass_after_the_batches_before() -> None:
    def fail_at_three(samples: list[int]) -> dict[str, Any]:
        if samples[0] == 6:
            raise ValueError("six")
        return rows_of(samples)

    case = case_of(20, 1, 2)
    plan = replace(case.plan(0), source=Ragged(20, 0), collate=fail_at_three, buffer_size=8)
    trainer = Trainer(0)
    trainer.pipeline = Pipeline(plan, Run(state=case.fresh(0), end_epoch=1), Workers(0), trainer, Stages())
    with anyio.fail_after(10), pytest.raises(AioLoaderError, match=r"micro-batch 3 of lane 0 .* ValueError: six"):
        await trainer.pipeline.run()
    assert trainer.batches == [[0, 1], [2, 3], [4, 5]]


class Weighed(Workers):
    """A pool whose samples take what `sizes` says; it knows what of them is held."""

    def __init__(self, seed: int, sizes: list[int]) -> None:
        super().__init__(seed)
        self._sizes = sizes
        self._held = HeldBytes()
        self.most_held = 0

    @property
    def held_bytes(self) -> int:  # type: ignore[override]
        return self._held.total

    async def run(self, chunk: Chunk) -> Block:
        await super().run(chunk)
        samples, nbytes = [], 0
        for row in chunk.records:
            sample = np.empty(self._sizes[row], np.uint8)
            sample[:8] = np.frombuffer(int(row).to_bytes(8, "little"), np.uint8)
            self._held.hold_with(sample, sample.nbytes)
            samples.append(sample)
            nbytes += sample.nbytes
            if chunk.max_bytes is not None and nbytes > chunk.max_bytes:
                break
        self.most_held = max(self.most_held, self._held.total)
        return Block(Outcome(len(samples), None, samples, None), "made up", 1e-5 * len(samples), nbytes, 3 * len(samples))


class LateTrainer(Trainer):
    """Gives slots back in a later turn of the loop, as a process of its own would."""

    async def put(self, ready: Ready) -> None:
        self.batches.append(ready.fields["rows"].array.tolist())
        await self.room()
        asyncio.get_running_loop().call_soon(self._take, ready.num_records)

    def _take(self, num_records: int) -> None:
        assert self.pipeline is not None
        self.pipeline.budget.slots.deliver(num_records)
        self.pipeline.budget.changed()


def rows_in(samples: list[Any]) -> dict[str, Any]:
    return {"rows": np.array([int.from_bytes(sample[:8].tobytes(), "little") for sample in samples])}


SIZES: dict[str, Callable[[random.Random], int]] = {
    "tiny, then large": lambda rng: 0,
    "now and then": lambda rng: 300_000 if rng.random() < 0.02 else 64,
    "heavy tail": lambda rng: min(400_000, int(rng.lognormvariate(6, 2.5)) + 8),
    "above the limit": lambda rng: 3_000_000 if rng.random() < 0.05 else 64,
}


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("kind", SIZES)
async def test_results_of_any_sizes_stay_within_the_bytes(kind: str, batch_size: int) -> None:
    """Above the limit are at most those that were made when it came out how large they are: one for each chunk that a worker may hold.

    A micro-batch that alone is above it gets its records one by one, beside what was done ahead of it, within the limit, by then.
    """
    limit, number = 2 << 20, 2000
    for seed in range(3):
        rng = random.Random(seed)
        sizes = [SIZES[kind](rng) or (64 if row < number // 2 else 300_000) for row in range(number)]
        pool, trainer = Weighed(seed, sizes), LateTrainer(seed)
        case = case_of(number, 1, batch_size, num_epochs=1)
        plan = replace(case.plan(0), source=Ragged(number, seed), collate=rows_in, buffer_size=512, memory_limit=limit)
        pipeline = trainer.pipeline = Pipeline(plan, Run(state=case.fresh(0), end_epoch=1), pool, trainer, Stages())
        with anyio.fail_after(20):
            await pipeline.run()
        assert [row for rows in trainer.batches for row in rows] == list(range(number))
        needed = max(sum(sizes[first : first + batch_size]) for first in range(0, number, batch_size))
        above = needed if needed > limit else 0
        assert pool.most_held <= limit + above + pool.capacity * (max(sizes) + (1 << 16))
        budget = pipeline.budget
        assert (budget.slots.in_flight, budget.in_flight_bytes) == (0, pool.held_bytes)


class FirstOneLast(Workers):
    """A pool whose first chunk takes until the next 256 records are done."""

    num_done = 0

    async def run(self, chunk: Chunk) -> Block:
        block = await super().run(chunk)
        if chunk.records[0]:
            self.num_done += len(chunk.records)
        else:
            while self.num_done < 256 or self.num_running:
                await anyio.lowlevel.checkpoint()
        return block


async def run_one_epoch(trainer: Trainer, pool: Workers, **options: Any) -> None:
    """Run a pass over 512 records, in micro-batches of one unless the options of the plan say otherwise; none is kept at its end."""
    case = case_of(512, 1, 1, num_epochs=1)
    plan = replace(case.plan(0), source=Ragged(512, 0), **{"collate": rows_of, "buffer_size": 2048, **options})
    trainer.pipeline = Pipeline(plan, Run(state=case.fresh(0), end_epoch=1), pool, trainer, Stages())
    with anyio.fail_after(20):
        await trainer.pipeline.run()
    assert trainer.num_kept == 0


async def test_batches_of_several_results_that_are_there_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "_QUICK_S", 60.0)
    trainer = Trainer(0)
    await run_one_epoch(trainer, FirstOneLast(0))
    assert len(trainer.batches) == 512
    assert trainer.most_kept > 256, "the first result came last, and nothing had to be waited for after it"


async def test_quick_batches_wait_for_others_for_3_ms_in_all() -> None:
    def half_a_ms(samples: list[int]) -> dict[str, Any]:
        time.sleep(0.0005)
        return rows_of(samples)

    trainer = Trainer(0)
    await run_one_epoch(trainer, FirstOneLast(0), collate=half_a_ms)
    assert len(trainer.batches) == 512
    assert trainer.most_kept <= 7


class OneThenNone:
    """Batches whose first sample makes a group; the others take their time to make none."""

    def __init__(self) -> None:
        self.num_pushed = 0

    def start(self) -> Any:
        whole = FixedBatch(1).start()

        def push(item: Item) -> Iterator[Group]:
            self.num_pushed += 1
            if self.num_pushed > 1:
                time.sleep(0.0005)
                return iter(())
            return whole.push(item)

        others = {name: getattr(whole, name) for name in ("ready", "finish", "counters", "state", "refs", "restore")}
        return SimpleNamespace(push=push, **others)

    def fingerprint(self) -> Mapping[str, Json]:
        return {}


async def test_a_batch_does_not_wait_while_none_is_formed() -> None:
    """The results that come after it are all there, and it is known only afterwards that they give nothing."""
    pushed_at_flush = []

    class Noting(Trainer):
        async def flush(self) -> None:
            if self.num_kept:
                pushed_at_flush.append(batching.num_pushed)
            await super().flush()

    batching = OneThenNone()
    trainer = Noting(0)
    await run_one_epoch(trainer, FirstOneLast(0), batching=batching)
    assert (trainer.batches, batching.num_pushed) == ([[0]], 512)
    assert len(pushed_at_flush) == 1
    assert pushed_at_flush[0] <= 100, (
        "no more than the rest of its own result, which is 100 records at most, since they took longer than 3 ms"
    )


class LastLeftOut(FirstOneLast):
    """A pool that leaves out the last record of each chunk."""

    async def run(self, chunk: Chunk) -> Block:
        await super().run(chunk)
        number = len(chunk.records)
        counts = [1] * (number - 1) + [0]
        return Block(Outcome(number, counts, chunk.records[:-1], None, [Quarantined(number - 1, None, None)]), "made up", 0.001)


async def test_no_batch_waits_while_records_that_are_left_out_are_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    num_kept: list[int] = []
    trainer = Trainer(0)
    monkeypatch.setattr(pipeline_module, "_QUICK_S", 60.0)
    monkeypatch.setattr(pipeline_module, "log_quarantined", lambda _: num_kept.append(trainer.num_kept))
    await run_one_epoch(trainer, LastLeftOut(0))
    assert len(trainer.batches) + len(num_kept) == 512
    assert max(num_kept) == 0


@pytest.mark.parametrize(("slow_s", "most_kept"), [(0.0, 8), (0.02, 1)])
async def test_batches_wait_for_others_only_where_these_come_at_once(slow_s: float, most_kept: int) -> None:
    """Every fourth one is slow, which nobody can know before; once one was, a trainer that waits gets what is there."""
    num_collated = 0

    def sometimes_slow(samples: list[int]) -> dict[str, Any]:
        nonlocal num_collated
        num_collated += 1
        time.sleep(slow_s if num_collated % 4 == 1 else 0)
        return rows_of(samples)

    trainer = Trainer(0)
    await run_one_epoch(trainer, Workers(0), collate=sometimes_slow, buffer_size=512)
    assert len(trainer.batches) == 512
    assert (trainer.most_kept == most_kept) if slow_s else (trainer.most_kept >= most_kept)
