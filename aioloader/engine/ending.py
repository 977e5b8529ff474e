"""The end of a pass by arithmetic: how many steps it has where that is certain, and the state after it where a rank stops early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from aioloader.batching import FixedBatch
from aioloader.engine.plan import Plan
from aioloader.protocols import Json

__all__ = ["NumSteps", "num_steps", "stopped_state"]


class NumSteps(NamedTuple):
    """Micro-batches of one epoch: of the shortest lane, of the longest one, and of the longest one of this rank."""

    shortest: int
    longest: int
    own: int


def num_steps(plan: Plan, *, is_one_to_one: bool) -> NumSteps | None:
    """Return how many micro-batches the lanes have; None where it depends on the data.

    Args:
        plan: Of the loader.
        is_one_to_one: Each record is one sample.
    """
    if plan.num_records is None or not is_one_to_one or not isinstance(plan.batching, FixedBatch):
        return None
    num_lanes, batch_size = plan.lanes.num_lanes, plan.batching.batch_size
    if not plan.keep_partial:
        steps = plan.num_records // num_lanes // batch_size
        return NumSteps(steps, steps, steps)

    def of_lane(lane: int) -> int:
        return -(-plan.lanes.num_before(lane, plan.num_records or 0) // batch_size)

    return NumSteps(of_lane(num_lanes - 1), of_lane(0), of_lane(plan.lanes.served[0]))


def stopped_state(plan: Plan, state: Json, end_epoch: int) -> Json:
    """Return the state at the start of the next pass of a rank that stops in `state`, because another one has nothing left.

    What its lanes had taken and not delivered counts as dropped; so do records that were never read, where their number is known.
    """
    lanes = {}
    for name, lane in state["lanes"].items():
        num_left = _num_left(plan, state["source"], int(name), lane, end_epoch)
        lanes[name] = _stopped_lane(plan, lane, num_left, end_epoch)
    return {**state, "end_epoch": None, "turn": 0, "source": {"epoch": end_epoch, "position": 0, "cursor": None}, "lanes": lanes}


def _num_left(plan: Plan, source: Json, number: int, lane: Json, end_epoch: int) -> int:
    """Return the records that a lane has not taken of the epochs before `end_epoch`, 0 where that is not known."""
    if plan.num_records is None or lane["epoch"] >= end_epoch:
        return 0
    num_records = plan.num_records
    if lane["epoch"] == source["epoch"] and isinstance(source["cursor"], Mapping):  # the epoch is what an earlier run left of it
        num_records -= int(source["cursor"]["then"]) - len(source["cursor"]["left"])
    num_later: int = plan.lanes.num_before(number, plan.num_records) * (end_epoch - 1 - lane["epoch"])
    return plan.lanes.num_before(number, num_records) + num_later - int(lane["seq"]) - (1 if lane["sub"] else 0)


def _stopped_lane(plan: Plan, lane: Json, num_left: int, end_epoch: int) -> Json:
    counts = dict(lane["counts"])
    counts["dropped_samples"] += _num_held(counts)
    counts["dropped_records"] += num_left
    batcher = plan.batching.start().state()
    if "counters" in batcher:  # which count from the start of the run; the rest is what it held
        batcher = {**batcher, "counters": lane["batcher"]["counters"]}
    return {**lane, "epoch": end_epoch, "seq": 0, "sub": 0, "batcher": batcher, "counts": counts}


def _num_held(counts: Mapping[str, int]) -> int:
    """Return the samples that were made of the records taken and have not gone anywhere yet."""
    gone = ("delivered_samples", "dropped_samples", "batching_dropped_samples", "batching_empty_samples")
    return int(counts["samples"] - sum(counts.get(name, 0) for name in gone))
