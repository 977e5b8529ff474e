"""Replay: one micro-batch made again by running its lane alone."""

from __future__ import annotations

from dataclasses import replace

from aioloader.engine.inline import InlinePass
from aioloader.engine.output import Ready
from aioloader.engine.plan import Plan, Run
from aioloader.engine.resuming import starting_state
from aioloader.errors import ConfigError, ResumeError
from aioloader.order.lanes import LaneMap
from aioloader.pools.runner import Preprocess
from aioloader.protocols import Json
from aioloader.state.schema import check_schema, check_state
from aioloader.telemetry.stages import Stages

__all__ = ["replay"]


def replay(plan: Plan, preprocess: Preprocess, *, step: int, lane: int, state: Json | None, epochs: int | None) -> tuple[Ready, Json]:
    """Return the micro-batch of a lane at a step, and the state that its own is a part of. See `Loader.replay`."""
    num_lanes = plan.lanes.num_lanes
    if type(lane) is not int or not 0 <= lane < num_lanes:
        raise ConfigError("Loader.replay(lane=)", expected=f"a lane from 0 to {num_lanes - 1}", got=repr(lane), do="take batch.lane")
    if type(step) is not int or step < 0:
        raise ConfigError("Loader.replay(step=)", expected="a step of 0 or more", got=repr(step), do="take batch.step")
    alone = LaneMap(num_lanes=num_lanes, dp_rank=lane, dp_size=num_lanes)
    plan = replace(plan, lanes=alone)
    fresh = starting_state(plan)
    begun = fresh if state is None else _state_of_lane(state, fresh, lane)
    if begun["lanes"][str(lane)]["step"] > step:
        difference = ("step", begun["lanes"][str(lane)]["step"], f"at most {step}")
        raise ResumeError([difference], do="pass a state that was saved before that step, or none", where=f"Loader.replay(step={step})")
    end_epoch = begun["end_epoch"] if begun["end_epoch"] is not None or epochs is None else begun["source"]["epoch"] + epochs
    run = Run(state=begun, end_epoch=end_epoch, epochs=epochs, resumed=state is not None)
    batches = iter(InlinePass(plan, run, preprocess, Stages(), first_step=step))
    try:
        found = next(batches, None)
    finally:
        batches.close()  # type: ignore[attr-defined]
    if found is None:
        raise ConfigError(
            "Loader.replay(step=)",
            expected=f"a step that lane {lane} has in the pass up to epoch {end_epoch}",
            got=step,
            do="pass a state of the pass that the step belongs to",
        )
    return found, begun


def _state_of_lane(state: Json, fresh: Json, lane: int) -> Json:
    """Return the state of a rank that serves this lane alone."""
    check_schema(state)
    if str(lane) not in state["lanes"]:
        served = ", ".join(state["lanes"])
        difference = ("lanes", served, f"lane {lane} among them")
        raise ResumeError(
            [difference], do="pass the state of the rank that served the lane, or a merged one", where="Loader.replay(state=)"
        )
    alone = {**state, "dp_rank": lane, "dp_size": fresh["dp_size"], "turn": 0, "lanes": {str(lane): state["lanes"][str(lane)]}}
    check_state(alone, fresh)
    return alone
