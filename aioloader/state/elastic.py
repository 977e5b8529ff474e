"""Elastic state: the states of all ranks as one, and that one dealt to any number of ranks that divides the number of lanes.

    rank 0: lanes 0 2          merge                    split into 4        rank 0: lane 0   rank 1: lane 1
    rank 1: lanes 1 3    ------------->  lanes 0 1 2 3  ------------->      rank 2: lane 2   rank 3: lane 3

All that happens after the order belongs to a lane, so a lane does not notice which rank serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aioloader.errors import ConfigError, ResumeError
from aioloader.order.lanes import LaneMap
from aioloader.protocols import Json, RecordId
from aioloader.state.schema import check_schema, differences

__all__ = ["change_source", "is_whole", "merge", "quarantined", "redeal", "split"]

_MERGE = "aioloader.state.merge: the states do not belong together"
_WHOLE = "pass what state_dict() returned on each rank of one run, each once, all saved after the same step"


def is_whole(state: Mapping[str, Any]) -> bool:
    """Return whether this is a merged state, with the lanes of all ranks."""
    return state["dp_rank"] is None


def quarantined(state: Mapping[str, Any]) -> frozenset[RecordId]:
    """Return the records that any lane of a state left out because they failed."""
    return frozenset((shard, row) for lane in state["lanes"].values() for shard, row in lane["quarantined"])


def merge(states: Iterable[Json]) -> Json:
    """Return one state for all ranks, made of those of each, in any order. `Loader.load_state_dict` takes it on any rank.

    It resumes on every number of ranks that divides the number of lanes, with the same global batches.

    Raises:
        ResumeError: A rank is missing or there twice, the states are not of one run, or were not saved after the same step;
            each difference is named.
    """
    given = list(states)
    if not given:
        raise ResumeError([("states", "none", "one of each rank")], do=_WHOLE, where=_MERGE)
    for state in given:
        check_schema(state)
    if len(given) == 1 and is_whole(given[0]):
        return given[0]
    first = given[0]
    if first["fingerprint"]["source"].get("kind") == "already_sharded":
        do = "load on each rank the state that it saved, or give all ranks the same source and no AlreadySharded"
        raise ResumeError([("source", "split already, another one on each rank", "one that all ranks share")], do=do, where=_MERGE)
    _check_same_run(first, given)
    _check_ranks(first["dp_size"], [state["dp_rank"] for state in given])
    lanes = {name: lane for state in given for name, lane in state["lanes"].items()}
    if lanes.keys() != {str(lane) for lane in range(first["num_lanes"])}:
        raise ResumeError([("lanes", ", ".join(sorted(lanes)), f"0 to {first['num_lanes'] - 1}")], do=_WHOLE, where=_MERGE)
    lanes = {str(lane): lanes[str(lane)] for lane in range(first["num_lanes"])}
    _check_steps([lane["step"] for lane in lanes.values()])
    source = min((state["source"] for state in given), key=lambda place: (place["epoch"], place["position"]))
    return {**first, "dp_rank": None, "source": source, "turn": None, "lanes": lanes}


def split(state: Json, dp_size: int) -> list[Json]:
    """Return the states of the ranks of a run on `dp_size` ranks, made of a merged one.

    Raises:
        ResumeError: It is not a merged state.
        ConfigError: `dp_size` does not divide the number of lanes.
    """
    check_schema(state)
    if not is_whole(state):
        raise ResumeError(
            [("dp_rank", state["dp_rank"], "None, as in a merged state")],
            do="merge the states of all ranks first",
            where="aioloader.state.split",
        )
    num_lanes = state["num_lanes"]
    if type(dp_size) is not int or dp_size < 1 or num_lanes % dp_size:
        divisors = ", ".join(str(size) for size in range(1, num_lanes + 1) if num_lanes % size == 0)
        raise ConfigError(
            "aioloader.state.split(dp_size=)",
            expected=f"a divisor of the {num_lanes} lanes of the state ({divisors})",
            got=repr(dp_size),
            do="use one of these; give a run more lanes than ranks at its start to be free later",
        )
    return [_rank_state(state, LaneMap(num_lanes=num_lanes, dp_rank=rank, dp_size=dp_size)) for rank in range(dp_size)]


def redeal(state: Json, fresh: Json) -> Json:
    """Return a merged state for another number of lanes: what no lane has delivered comes next, each record once, in its order.

    For sources that are read by position, and batches of single samples. Steps are counted on; global batches are others.

    Args:
        state: A merged state.
        fresh: The state of a new run with all its lanes.

    Raises:
        ResumeError: Lanes stand in different epochs, or some samples of a record were delivered and others were not.
    """
    lanes, source = list(state["lanes"].values()), state["source"]
    found: list[tuple[str, Any, Any]] = []
    if any(lane["epoch"] != source["epoch"] for lane in lanes):
        found.append(("epochs of the lanes", sorted({lane["epoch"] for lane in lanes} | {source["epoch"]}), "one and the same"))
    if any(lane["sub"] or not _are_whole(lane["batcher"]["refs"]) for lane in lanes):
        found.append(("records", "delivered in part", "delivered whole, to be dealt to another number of lanes"))
    if found:
        raise ResumeError(found, do=f"go on with {state['num_lanes']} lanes until another step, and save there")
    then = max(lane["seq"] for lane in lanes) * len(lanes)
    left = sorted(
        seq * len(lanes) + number
        for number, lane in enumerate(lanes)
        for seq in [*{seq for seq, _ in lane["batcher"]["refs"]}, *range(lane["seq"], then // len(lanes))]
    )
    cursor = {"left": [_original(source["cursor"], at) for at in left], "then": _original(source["cursor"], then), "at": 0}
    return {
        **state,
        "num_lanes": fresh["num_lanes"],
        "source": {"epoch": source["epoch"], "position": 0, "cursor": cursor},
        "lanes": _redealt(lanes, fresh["lanes"]),
    }


def _redealt(lanes: Sequence[Json], fresh: Json) -> Json:
    """Return new lanes that count on where the old ones are; the first one keeps the sums."""
    step = max(lane["step"] for lane in lanes)
    quarantined = [list(record) for record in dict.fromkeys(tuple(record) for lane in lanes for record in lane["quarantined"])]
    counts = {name: sum(lane["counts"][name] for lane in lanes) for name in lanes[0]["counts"]}
    for lane in lanes:  # what is still in a buffer is taken once more
        counts["records"] -= len({seq for seq, _ in lane["batcher"]["refs"]})
        counts["samples"] -= len(lane["batcher"]["refs"])
    dealt = {name: {**lane, "epoch": lanes[0]["epoch"], "step": step, "quarantined": quarantined} for name, lane in fresh.items()}
    dealt["0"]["counts"] = counts
    return dealt


def _are_whole(refs: Sequence[tuple[int, int]]) -> bool:
    """Return whether records whose samples are in a buffer are there from their first sample on."""
    return {seq for seq, _ in refs} == {seq for seq, sub in refs if sub == 0}


def _original(cursor: Json, position: int) -> int:
    """Return where a position is in the whole epoch, if it was counted in what an earlier run left."""
    if not isinstance(cursor, Mapping):
        return position
    left, then = cursor["left"], int(cursor["then"])
    return int(left[position]) if position < len(left) else then + position - len(left)


def change_source(state: Json, adopt: Callable[[Json, Json, int], Json]) -> Json:
    """Return a state whose source goes on as another from the first block of positions on that no lane has reached.

    Args:
        state: A merged state, or that of a single rank: all ranks must agree on that position.
        adopt: Makes the new cursor of the one saved, the fingerprint of the source that it belongs to, and that position.

    Raises:
        ResumeError: Lanes of other ranks are missing, or lanes stand in different epochs.
    """
    lanes, source = state["lanes"].values(), state["source"]
    found: list[tuple[str, Any, Any]] = []
    if len(lanes) != state["num_lanes"]:
        found.append(("lanes", ", ".join(state["lanes"]), f"0 to {state['num_lanes'] - 1}"))
    if any(lane["epoch"] != source["epoch"] for lane in lanes):
        found.append(("epochs of the lanes", sorted({lane["epoch"] for lane in lanes} | {source["epoch"]}), "one and the same"))
    if found:
        raise ResumeError(found, do="load aioloader.state.merge(...) of the states of all ranks, saved inside an epoch")
    until = (max(lane["seq"] + (lane["sub"] > 0) for lane in lanes)) * state["num_lanes"]
    return {**state, "source": {**source, "cursor": adopt(source["cursor"], state["fingerprint"]["source"], until)}}


def _rank_state(state: Json, lanes: LaneMap) -> Json:
    own = {str(lane): state["lanes"][str(lane)] for lane in lanes.served}
    steps = [lane["step"] for lane in own.values()]
    turn = sum(step > min(steps) for step in steps)  # those that have their part of the step that was begun come first
    return {**state, "dp_rank": lanes.dp_rank, "dp_size": lanes.dp_size, "turn": turn, "lanes": own}


def _check_same_run(first: Json, states: Sequence[Json]) -> None:
    found = []
    for state in states[1:]:
        pairs = [(name, state[name], first[name]) for name in ("num_lanes", "dp_size", "end_epoch") if state[name] != first[name]]
        pairs += [(f"fingerprint.{name}", left, right) for name, left, right in differences(state["fingerprint"], first["fingerprint"])]
        found += [(f"rank {state['dp_rank']}: {name}", left, f"{right!r}, as on rank {first['dp_rank']}") for name, left, right in pairs]
    if found:
        raise ResumeError(found, do=_WHOLE, where=_MERGE)


def _check_ranks(dp_size: int, ranks: Sequence[Any]) -> None:
    missing = sorted(set(range(dp_size)) - set(ranks))
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1 or rank not in range(dp_size)}, key=repr)
    found: list[tuple[str, Any, Any]] = [(f"state of rank {rank}", "missing", f"one of each of {dp_size} ranks") for rank in missing]
    found += [(f"state of rank {rank}", f"{ranks.count(rank)} of them", f"one of each of {dp_size} ranks") for rank in twice]
    if found:
        raise ResumeError(found, do=_WHOLE, where=_MERGE)


def _check_steps(steps: Sequence[int]) -> None:
    """Check that the lanes are after the same step, or that a step was begun and the first lanes have their part of it."""
    ahead = [step > min(steps) for step in steps]
    if max(steps) - min(steps) > 1 or ahead != sorted(ahead, reverse=True):
        listed = ", ".join(f"lane {lane}: {step}" for lane, step in enumerate(steps))
        raise ResumeError([("micro-batches delivered", listed, "the same number in each lane")], do=_WHOLE, where=_MERGE)
