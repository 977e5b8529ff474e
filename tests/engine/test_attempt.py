"""One chunk on its way through the failure policy: what is left of the room for its samples after each failure."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from aioloader.engine.assembler import Stamps
from aioloader.engine.attempt import Attempt
from aioloader.faults import FaultPolicy, Quarantine, class_names
from aioloader.pools.chunk import Block, Chunk, Failure, Outcome
from aioloader.protocols import RecordId
from aioloader.runtime.segments import HeldBytes


def run(chunk: Chunk, sizes: list[int | None]) -> Block:
    """Return what a pool makes of a chunk whose records become samples of known sizes; None: they fail."""
    samples: list[int] = []
    for _, row in chunk.ids:
        size = sizes[row]
        if size is None:
            return Block(
                Outcome(len(samples), None, samples, Failure("ValueError", "bad", "", None, class_names(ValueError))),
                "0",
                0.0,
                sum(samples),
            )
        samples.append(size)
        if chunk.max_bytes is not None and sum(samples) > chunk.max_bytes:
            break
    return Block(Outcome(len(samples), None, samples, None), "0", 0.0, sum(samples))


@example(sizes=[50, None, 50, None, 50], max_bytes=60)
@given(sizes=st.lists(st.one_of(st.none(), st.integers(0, 50)), min_size=1, max_size=20), max_bytes=st.integers(0, 100))
def test_samples_of_all_runs_together_take_no_more_than_a_chunk_may(sizes: list[int | None], max_bytes: int) -> None:
    ids: list[RecordId] = [("shard", row) for row in range(len(sizes))]
    rows = range(len(sizes))
    attempt = Attempt(FaultPolicy(Quarantine()), (), Stamps([0] * len(sizes), rows, ids), Chunk(0, rows, ids, max_bytes=max_bytes))
    while (step := attempt.step()) is not None:
        block = run(step.chunk, sizes)
        attempt.ran(block)
        if block.outcome.failure is None and block.outcome.num_done < len(step.chunk.records):
            break
    made = attempt.block.outcome.samples
    last = made[-1] if made else 0
    assert list(made) == [size for size in sizes[: attempt.num_taken] if size is not None]
    assert sum(made) - last <= max_bytes


def test_what_samples_hold_is_counted_until_all_that_was_made_of_them_is_gone() -> None:
    held, sizes = HeldBytes(), [50, None, 20]
    ids: list[RecordId] = [("shard", row) for row in range(3)]
    attempt = Attempt(FaultPolicy(Quarantine()), (), Stamps([0] * 3, range(3), ids), Chunk(0, range(3), ids))
    while (step := attempt.step()) is not None:
        part = run(step.chunk, sizes)
        held.hold_with(part, part.nbytes)
        attempt.ran(part)
    whole = attempt.block
    del attempt, part
    assert (whole.nbytes, held.total) == (70, 70)
    del whole
    assert held.total == 0
