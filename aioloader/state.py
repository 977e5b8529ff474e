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

import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from types import BuiltinFunctionType, CodeType
from typing import Any

from aioloader.errors import ConfigError, ResumeError
from aioloader.order.lanes import LaneMap
from aioloader.protocols import Json

__all__ = ["STATE_VERSION", "check_state", "fresh_state", "function_fingerprint", "object_fingerprint", "require_json"]

STATE_VERSION = 1
_KEYS = ("version", "fingerprint", "num_lanes", "dp_rank", "dp_size", "end_epoch", "source", "turn", "lanes")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""What makes the default `repr` of the same object differ from one process to the next."""


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


def check_state(state: Any, present: Json, *, accept: Collection[str] = ()) -> None:
    """Check that `state` can be resumed by a loader whose own fresh state is `present`.

    `accept` names the fingerprint entries whose difference is wanted.

    Raises:
        ResumeError: It is damaged or belongs to something else; lists every difference.
    """
    if not isinstance(state, Mapping) or any(key not in state for key in _KEYS):
        missing = "no mapping" if not isinstance(state, Mapping) else f"no {', '.join(key for key in _KEYS if key not in state)}"
        raise ResumeError([("keys", missing, ", ".join(_KEYS))], do="pass what state_dict() returned, whole")
    if state["version"] != STATE_VERSION:
        raise ResumeError([("version", state["version"], STATE_VERSION)], do="load it with the version of aioloader that saved it")
    differences = [(name, state[name], present[name]) for name in ("num_lanes", "dp_rank", "dp_size") if state[name] != present[name]]
    if not differences and (not isinstance(state["lanes"], Mapping) or state["lanes"].keys() != present["lanes"].keys()):
        raise ResumeError([("lanes", _names(state["lanes"]), _names(present["lanes"]))], do="pass what state_dict() returned, whole")
    saved, here = _flatten(state["fingerprint"]), _flatten(present["fingerprint"])
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name) and not _is_accepted(name, accept):
            differences.append((name, saved.get(name), here.get(name)))
    if differences:
        names = ", ".join(sorted({what.partition(".")[0] for what, _, _ in differences}))
        raise ResumeError(
            differences,
            do=f"resume with the configuration that saved it, or start anew; to accept a difference on purpose, pass its name, "
            f"e.g. load_state_dict(state, accept=[{names.split(', ')[0]!r}]) (number of lanes and ranks cannot be accepted)",
        )


def function_fingerprint(function: Callable[..., Any] | None) -> Json:
    """Return what identifies a function or callable object: its name, its code, its settings. Small and JSON-compatible."""
    if function is None:
        return None
    if isinstance(function, functools.partial):
        return {
            "partial": function_fingerprint(function.func),
            "arguments": _digest(_ADDRESS.sub("", repr((function.args, sorted(function.keywords.items()))))),
        }
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        return {"name": function.__qualname__, "code": _digest(_code_text(code))}
    return object_fingerprint(function)


def object_fingerprint(value: Any) -> Json:
    """Return `value.fingerprint()` where there is one, else the name of its class and its code."""
    own = getattr(value, "fingerprint", None)
    if callable(own) and not isinstance(value, type):
        return require_json(dict(own()), where=f"{type(value).__qualname__}.fingerprint()")
    if hasattr(value, "__code__"):
        return function_fingerprint(value)
    code = getattr(type(value).__dict__.get("__call__"), "__code__", None)
    named = value if isinstance(value, type | BuiltinFunctionType) else type(value)
    return {"name": named.__qualname__, "code": _digest(_code_text(code)) if isinstance(code, CodeType) else None}


def require_json(value: Any, *, where: str) -> Json:
    """Return `value` as JSON gives it back: tuples become lists, keys become text.

    Raises:
        ConfigError: JSON refuses it.
    """
    try:
        copy = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            where, expected="JSON-compatible data", got=f"{value!r} ({error})", do="return str, int, float, bool, None, list, dict"
        ) from error
    return copy


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


def _code_text(code: CodeType) -> str:
    return f"{code.co_code.hex()} {code.co_names} {[_constant_text(one) for one in code.co_consts]}"


def _constant_text(constant: object) -> str:
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, frozenset):  # its order changes with PYTHONHASHSEED
        return repr(sorted(map(repr, constant)))
    return repr(constant)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
