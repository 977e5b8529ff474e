"""What a checkpoint of a loader says, and whether it fits the loader that it is loaded into.

    version       of this layout
    fingerprint   source, batching, collator, preprocess, seed: whatever decides what is delivered
    num_lanes, dp_rank, dp_size
    end_epoch     where the interrupted pass ends (None: without end, or between passes)
    source        epoch, position and the source's own cursor from which to read
    turn          the lane of this rank whose micro-batch comes next
    lanes         for each lane of this rank: epoch, seq, sub, step, batcher buffer by reference, counts

JSON, a few KiB, of constant shape but for the lists of references.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from aioloader.errors import ResumeError
from aioloader.order.lanes import LaneMap
from aioloader.protocols import Json

__all__ = ["STATE_VERSION", "check_schema", "check_state", "differences", "fresh_state"]

STATE_VERSION = 2
_KEYS = ("version", "fingerprint", "num_lanes", "dp_rank", "dp_size", "end_epoch", "source", "turn", "lanes")


def fresh_state(fingerprint: Json, lanes: LaneMap, rank_state: Mapping[str, Json], epoch: int) -> Json:
    """Return the state of a rank before the first record of `epoch`; `rank_state` holds its turn and lanes."""
    return {
        "version": STATE_VERSION,
        "fingerprint": fingerprint,
        "num_lanes": lanes.num_lanes,
        "dp_rank": lanes.dp_rank,
        "dp_size": lanes.dp_size,
        "end_epoch": None,
        "source": {"epoch": epoch, "position": 0, "cursor": None},
        **rank_state,
    }


def check_schema(state: Any) -> None:
    """Check that `state` has the shape of a loader's state.

    Raises:
        ResumeError: It is damaged, or of another version.
    """
    if not isinstance(state, Mapping) or any(key not in state for key in _KEYS):
        missing = "no mapping" if not isinstance(state, Mapping) else f"no {', '.join(key for key in _KEYS if key not in state)}"
        raise ResumeError([("keys", missing, ", ".join(_KEYS))], do="pass what state_dict() returned, whole")
    if state["version"] != STATE_VERSION:
        raise ResumeError([("version", state["version"], STATE_VERSION)], do="load it with the version of aioloader that saved it")


def check_state(state: Any, present: Json, *, accept: Collection[str] = ()) -> None:
    """Check that `state` can be resumed by a loader whose own fresh state is `present`.

    `accept` names the fingerprint entries whose difference is wanted.

    Raises:
        ResumeError: It is damaged or belongs to something else; lists every difference.
    """
    check_schema(state)
    found = [(name, state[name], present[name]) for name in ("num_lanes", "dp_rank", "dp_size") if state[name] != present[name]]
    if not found and (not isinstance(state["lanes"], Mapping) or state["lanes"].keys() != present["lanes"].keys()):
        raise ResumeError([("lanes", _names(state["lanes"]), _names(present["lanes"]))], do="pass what state_dict() returned, whole")
    found += [one for one in differences(state["fingerprint"], present["fingerprint"]) if not _is_accepted(one[0], accept)]
    if not found:
        _check_keys(state, present)
        return
    names = ", ".join(sorted({what.partition(".")[0] for what, _, _ in found}))
    do = (
        f"resume with the configuration that saved it, or start anew; to accept a difference on purpose, pass its name, "
        f"e.g. load_state_dict(state, accept=[{names.split(', ')[0]!r}]) (number of lanes and ranks cannot be accepted)"
    )
    if "dp_size" in names or "dp_rank" in names:
        do += "; for another number of ranks load aioloader.state.merge(...) of the states of all ranks"
    raise ResumeError(found, do=do)


def differences(left: Json, right: Json) -> list[tuple[str, Json, Json]]:
    """Return (name, left, right) of each entry that is not the same in both, by name; None where there is none."""
    saved, here = _flatten(left), _flatten(right)
    return [(name, saved.get(name), here.get(name)) for name in sorted(saved.keys() | here.keys()) if saved.get(name) != here.get(name)]


def _check_keys(state: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Check that nothing is missing inside: a state that lost a part would go on somewhere else without a word."""
    parts = ("source", "lanes")
    here, saved = _flatten({part: present[part] for part in parts}), _flatten({part: state[part] for part in parts})
    missing = [name for name in here if name not in saved and not any(one.startswith(f"{name}.") for one in saved)]
    if missing:
        raise ResumeError([(name, "nothing", "a value") for name in missing], do="pass what state_dict() returned, whole")


def _flatten(value: Json, prefix: str = "") -> dict[str, Json]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Json] = {}
    for name, part in value.items():
        flat.update(_flatten(part, f"{prefix}.{name}" if prefix else str(name)))
    return flat


def _names(lanes: Any) -> str:
    return f"lanes {', '.join(lanes)}" if isinstance(lanes, Mapping) else "no mapping"


def _is_accepted(name: str, accepted: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in accepted)
