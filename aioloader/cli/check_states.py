"""`aioloader check STATE...`: what saved states of a loader say, and whether they are those of all ranks of one run."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aioloader.errors import ConfigError, ResumeError
from aioloader.protocols import Json
from aioloader.state import describe, diff, fingerprint_hash, merge

__all__ = ["run"]

_OF_THE_RUN = ("version", "fingerprint", "num_lanes", "dp_size", "end_epoch")
"""What is equal in the states of all ranks of a run."""


def run(paths: Sequence[str], output_format: str) -> int:
    """Print the states in these files; return 1 if there are several and they do not belong together, with the reasons on stderr.

    Raises:
        ConfigError: A file cannot be read or holds no state.
    """
    states = {path: _load(path) for path in paths}
    hashes = {path: fingerprint_hash(state["fingerprint"]) for path, state in states.items()}
    reasons = _reasons(states) if len(states) > 1 else []
    if output_format == "json":
        found = [{"path": path, "fingerprint": hashes[path], "state": describe(state)} for path, state in states.items()]
        print(json.dumps({"states": found, "belong_together": not reasons, "reasons": reasons}, indent=2))
    else:
        texts = (f"{path}: fingerprint {hashes[path]}\n{textwrap.indent(describe(state), '  ')}" for path, state in states.items())
        print("\n\n".join(texts))
    for reason in reasons:
        print(reason, file=sys.stderr)
    return 1 if reasons else 0


def _load(path: str) -> Json:
    try:
        state = json.loads(Path(path).read_text(encoding="utf-8"))
        describe(state)
    except (OSError, ValueError) as error:  # ResumeError and JSONDecodeError are ValueErrors
        raise ConfigError(
            path, expected="the state of a loader, as JSON", got=error, do="write json.dumps(loader.state_dict()) there"
        ) from error
    return state


def _reasons(states: dict[str, Json]) -> list[str]:
    """Return why these are not the states of all ranks of one run; nothing if they are."""
    (first_path, first), *others = states.items()
    found = [
        f"{path}: {name}: expected {expected!r} as in {first_path}, got {got!r}"
        for path, state in others
        for name, got, expected in diff(_run_of(state), _run_of(first))
    ]
    if found or _is_split(first):
        return found
    try:
        merge(states.values())
    except ResumeError as error:
        return [str(error)]
    return []


def _run_of(state: Json) -> dict[str, Any]:
    run = {name: state[name] for name in _OF_THE_RUN}
    if _is_split(state):  # each rank has a source of its own
        run["fingerprint"] = {name: value for name, value in state["fingerprint"].items() if name != "source"}
    return run


def _is_split(state: Json) -> bool:
    return bool(state["fingerprint"]["source"].get("kind") == "already_sharded")
