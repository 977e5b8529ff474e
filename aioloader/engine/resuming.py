"""From a state that was saved to one that this rank goes on from: adopted, dealt anew, split or refused."""

from __future__ import annotations

from collections.abc import Collection

from aioloader.batching import FixedBatch
from aioloader.engine.assembler import fresh_rank_state
from aioloader.engine.plan import Plan
from aioloader.order.lanes import LaneMap
from aioloader.order.mixed import MixedStream
from aioloader.order.ordered import OrderedIndex
from aioloader.protocols import Json
from aioloader.state.elastic import change_source, is_whole, redeal, split
from aioloader.state.schema import check_schema, check_state, fresh_state

__all__ = ["fitted_state", "starting_state"]


def starting_state(plan: Plan, epoch: int = 0, lanes: LaneMap | None = None) -> Json:
    """Return the state before the first record of an epoch, of this rank or of that which serves `lanes`."""
    lanes = lanes or plan.lanes
    rank_state = fresh_rank_state(plan.batching, lanes, epoch, makes_fillers=plan.makes_fillers)
    return fresh_state(plan.fingerprint, lanes, rank_state, epoch)


def fitted_state(plan: Plan, state: Json, accept: Collection[str]) -> Json:
    """Return a saved state as one of this rank. See `Loader.load_state_dict`.

    1. Of another mixture, where that is accepted: it changes over at a position that no lane has reached.
    2. A merged one for another number of lanes, where the data can be dealt anew: what is left is dealt to these.
    3. A merged one: this rank's part of it.

    Raises:
        ResumeError: It belongs to another configuration.
    """
    check_schema(state)
    num_lanes = plan.lanes.num_lanes
    if isinstance(plan.source, MixedStream) and any(name.partition(".")[0] == "source" for name in accept):
        state = change_source(state, plan.source.adopt)
    if is_whole(state) and state["num_lanes"] != num_lanes and type(plan.source) is OrderedIndex and isinstance(plan.batching, FixedBatch):
        fresh = starting_state(plan, lanes=LaneMap(num_lanes=num_lanes))
        state = redeal(state, fresh)
        check_state({**state, "dp_rank": 0, "dp_size": 1, "turn": 0}, fresh, accept=accept)
    if is_whole(state) and state["num_lanes"] == num_lanes:
        state = split(state, plan.lanes.dp_size)[plan.lanes.dp_rank]
    check_state(state, starting_state(plan), accept=accept)
    return {**state, "fingerprint": plan.fingerprint}
