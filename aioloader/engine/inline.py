"""`workers=0`: the same stages one after another in the caller's thread. No process, no task: for debugging, with equal results."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from anyio.from_thread import start_blocking_portal

from aioloader.engine.assembler import Assembler, Turn
from aioloader.engine.attempt import Attempt
from aioloader.engine.errors import batching_error, source_error
from aioloader.engine.output import Ready, collate
from aioloader.engine.plan import Plan, Run
from aioloader.engine.producer import Queue, Stamper
from aioloader.engine.progress import Progress
from aioloader.engine.quarantine_log import log_quarantined
from aioloader.pools.chunk import Block
from aioloader.pools.rng import SwappedSeeding
from aioloader.pools.runner import Preprocess, Runner
from aioloader.protocols import Cursor, Json, Span
from aioloader.runtime.budget import Slots
from aioloader.sources.reading import open_share
from aioloader.telemetry.stages import Stages

__all__ = ["InlinePass"]

_MAX_READ = 64


class InlinePass:
    """One pass. Iterating it yields `Ready` micro-batches; afterwards `next_state` starts the next pass.

    Micro-batches of steps before `first_step` are made up to the collator, and passed over.
    """

    def __init__(self, plan: Plan, run: Run, preprocess: Preprocess, stages: Stages, first_step: int = 0) -> None:
        self.next_state: Json = None
        self.slots = Slots(plan.buffer_size or _MAX_READ)
        self._plan = plan
        self._run = run
        self._stages = stages
        self._first_step = first_step
        self._runner = Runner(preprocess, SwappedSeeding(preprocess.seed))
        self._assembler = Assembler(
            plan.lanes,
            plan.batching,
            run.state,
            self.slots,
            keep_partial=plan.keep_partial,
            first_repeat=plan.num_distinct,
            quarantined=run.quarantined,
        )
        self._progress = Progress(run)

    def following(self) -> Run | None:
        """Return the pass to run next if this one was resumed at its end."""
        return self._progress.following(self.next_state)

    def __iter__(self) -> Iterator[Ready]:
        """Yield the micro-batches in order; raise what failed after everything before it."""
        place = self._run.state["source"]
        epoch, position, cursor = place["epoch"], place["position"], place["cursor"]
        while not self._progress.is_over(epoch):
            stamper = Stamper.of(self._plan, self._run.state, epoch, position)
            yield from self._epoch(stamper, epoch, cursor)
            for row in stamper.held:
                self._assembler.drop_record(row[0])
            yield from self._collated(self._assembler.end_epoch(epoch))
            epoch, position, cursor = epoch + 1, 0, None
            if not self._progress.is_over(epoch):
                self._progress.check_epoch(epoch - 1)
        yield from self._collated(self._assembler.end_pass(self._plan.end))
        self.next_state = self._progress.next_pass(self._assembler)

    def _epoch(self, stamper: Stamper, epoch: int, cursor: Cursor | None) -> Iterator[Ready]:
        queue = Queue()
        with ExitStack() as stack:
            try:
                reading = _Reading(self._plan, epoch, cursor, stack)
                while (span := self._read(reading, stamper, epoch)) is not None:
                    passed = stamper.stamp(span, queue)
                    self.slots.start(len(span.records) - passed)
                    self.slots.note_peak()
                    while len(queue):
                        yield from self._process(queue, epoch)
            except _ReadError as error:
                stamper.release(queue)
                while len(queue):
                    yield from self._process(queue, epoch)
                yield from self._collated(self._assembler.end_early())
                raise source_error(error.cause) from error.cause.__cause__

    def _read(self, reading: _Reading, stamper: Stamper, epoch: int) -> Span | None:
        started = time.perf_counter()
        at, span = reading.read(min(_MAX_READ, self.slots.limit))
        self._progress.cursors.add((epoch, stamper.position), at)
        self._stages.source.add(0 if span is None else len(span.records), time.perf_counter() - started)
        return span

    def _process(self, queue: Queue, epoch: int) -> Iterator[Ready]:
        stamps, chunk = queue.cut(epoch, 1)
        started = time.perf_counter()
        attempt = Attempt(self._plan.faults, self._assembler.quarantined, stamps, chunk)
        while (step := attempt.step()) is not None:
            if step.delay_s:  # a sleep of nothing gives the CPU away
                time.sleep(step.delay_s)
            outcome = self._runner.run(step.chunk)
            if outcome.failure is not None and type(outcome.failure.error) is KeyboardInterrupt:
                raise outcome.failure.error  # Ctrl-C in this very process
            attempt.ran(Block(outcome, "inline", 0.0))
        outcome, error = attempt.block.outcome, attempt.error
        self._stages.preprocess.add(outcome.num_done, time.perf_counter() - started)
        self._stages.order.add(1, 0.0)
        turns = self._assembler.take(stamps, outcome)
        while error is None:
            started = time.perf_counter()
            try:
                turn = next(turns, None)
            except Exception as failure:  # noqa: BLE001 - a batching may be the user's own
                error = batching_error(failure)
                break
            self._stages.batch.add(0, time.perf_counter() - started)
            if turn is None:
                break
            yield from self._collated(iter([turn]))
        if self._assembler.newly_quarantined:
            log_quarantined(self._assembler.newly_quarantined)
            self._assembler.newly_quarantined = []
        if error is not None:
            yield from self._collated(self._assembler.end_early())
            raise error

    def _collated(self, turns: Iterator[Turn]) -> Iterator[Ready]:
        for turn in turns:
            if turn.batch.step >= self._first_step:
                yield self._collate(turn)
            else:
                self._progress.num_delivered += 1
                self.slots.deliver(turn.batch.num_records)

    def _collate(self, turn: Turn) -> Ready:
        started = time.perf_counter()
        ready = collate(turn, self._plan.collate, self._progress.state_after)
        self._stages.batch.add(ready.num_samples, time.perf_counter() - started)
        self._stages.bridge.add(1, 0.0)
        self._progress.num_delivered += 1
        return ready


class _ReadError(Exception):
    def __init__(self, cause: BaseException) -> None:
        self.cause = cause
        super().__init__(str(cause))


class _Reading:
    """An opened source, read in this thread; asynchronous sources run in the event loop of a helper thread."""

    def __init__(self, plan: Plan, epoch: int, cursor: Cursor | None, stack: ExitStack) -> None:
        try:
            self._reader: Any = open_share(plan.source, epoch, cursor, plan.lanes.share)
        except KeyboardInterrupt:  # Ctrl-C in this very process
            raise
        except BaseException as error:
            raise _ReadError(error) from error
        self._portal = stack.enter_context(start_blocking_portal()) if inspect.iscoroutinefunction(self._reader.read) else None
        stack.callback(self._close)

    def read(self, max_records: int) -> tuple[Cursor | None, Span | None]:
        try:
            at = self._reader.cursor()
            if self._portal is None:
                return at, self._reader.read(max_records)
            return at, self._portal.call(self._reader.read, max_records)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit: it ends the pass in its place, not the process
            raise _ReadError(error) from error

    def _close(self) -> None:
        if self._portal is None:
            self._reader.close()
        else:
            self._portal.call(self._reader.aclose)
