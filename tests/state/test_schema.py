"""State: what fits is accepted, what does not is refused with every difference, and fingerprints are the same in every process."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ConfigError, ResumeError
from aioloader.order.lanes import LaneMap
from aioloader.state.fingerprint import function_fingerprint, object_fingerprint, require_json
from aioloader.state.schema import STATE_VERSION, check_state, fresh_state

ROOT = Path(__file__).parents[2]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
FINGERPRINT = {"source": {"kind": "files", "names": ["a", "b"]}, "batching": {"kind": "FixedBatch", "batch_size": 8}, "seed": 0}


def make(fingerprint: Any = FINGERPRINT, *, num_lanes: int = 4, dp_rank: int = 1, dp_size: int = 2) -> Any:
    lanes = LaneMap(num_lanes=num_lanes, dp_rank=dp_rank, dp_size=dp_size)
    rank_state = {"turn": 0, "lanes": {str(lane): {"seq": 0} for lane in lanes.served}}
    return fresh_state(fingerprint, lanes, rank_state, 3)


def test_fresh_state_has_all_keys_and_starts_the_epoch() -> None:
    state = make()
    assert state["version"] == STATE_VERSION
    assert state["source"] == {"epoch": 3, "position": 0, "cursor": None}
    assert (state["num_lanes"], state["dp_rank"], state["dp_size"], list(state["lanes"])) == (4, 1, 2, ["1", "3"])
    assert json.loads(json.dumps(state)) == state


@given(fingerprint=st.dictionaries(st.text(max_size=4), json_values, max_size=4))
def test_what_was_saved_fits(fingerprint: dict[str, Any]) -> None:
    present = make(require_json(fingerprint, where="test"))
    check_state(json.loads(json.dumps(present)), present)


@pytest.mark.parametrize("key", ["version", "fingerprint", "num_lanes", "dp_rank", "dp_size", "end_epoch", "source", "turn", "lanes"])
def test_a_state_without_a_key_is_refused(key: str) -> None:
    state = make()
    del state[key]
    with pytest.raises(ResumeError, match=f"got 'no {key}' .*\npass what state_dict"):
        check_state(state, make())


@pytest.mark.parametrize("state", [None, 3, [], "state", b""])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ResumeError, match="got 'no mapping'"):
        check_state(state, make())


@pytest.mark.parametrize("version", [0, 1, "2", None])
def test_another_version_is_refused(version: Any) -> None:
    with pytest.raises(ResumeError, match=rf"version: expected 2 \(this loader\), got {version!r}.*\n.*the version of aioloader"):
        check_state({**make(), "version": version}, make())


def test_another_topology_is_refused_and_names_both_sides() -> None:
    with pytest.raises(ResumeError, match=r"num_lanes: expected 8 \(this loader\), got 4 \(the state\)") as caught:
        check_state(make(), make(num_lanes=8, dp_size=4))
    assert caught.value.differences == (("num_lanes", 4, 8), ("dp_size", 2, 4))
    with pytest.raises(ResumeError, match="dp_rank: expected 0"):
        check_state(make(), make(dp_rank=0), accept=["dp_rank"])


@pytest.mark.parametrize("lanes", [{}, {"1": {}}, {"1": {}, "2": {}}, [], None])
def test_a_state_whose_lanes_are_damaged_is_refused(lanes: Any) -> None:
    with pytest.raises(ResumeError, match=r"lanes: expected 'lanes 1, 3' .*\npass what state_dict\(\) returned"):
        check_state({**make(), "lanes": lanes}, make())


def test_every_difference_is_listed_and_can_be_accepted() -> None:
    other: dict[str, Any] = copy.deepcopy(FINGERPRINT)
    other["batching"]["batch_size"] = 16
    other["source"]["names"] = ["a"]
    other["more"] = 1
    with pytest.raises(ResumeError, match=r"accept=\['batching'\]") as caught:
        check_state(make(), make(other))
    assert caught.value.differences == (("batching.batch_size", 8, 16), ("more", None, 1), ("source.names", ["a", "b"], ["a"]))
    check_state(make(), make(other), accept=["batching", "source.names", "more"])
    with pytest.raises(ResumeError, match=r"more: expected 1 .*, got None"):
        check_state(make(), make(other), accept=["batching", "source"])
    with pytest.raises(ResumeError, match="batch_size"):
        check_state(make(), make(other), accept=["batch", "source", "more", "batching.batch"])


# Fingerprints


def double(value: Any, **_options: int) -> Any:
    """Return twice the value."""
    return value * 2


def triple(value: int) -> int:
    return value * 3


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, value: int) -> int:
        return value * self.factor

    def method(self, value: int) -> int:
        return value + self.factor


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> None:
        return None

    def fingerprint(self) -> dict[str, Any]:
        return {"name": self.name, "sizes": (1, 2)}


def closure() -> Callable[[str], bool]:
    return lambda text: text in {"one", "two", "three"}


KINDS: list[Any] = [
    double,
    triple,
    functools.partial(double),
    functools.partial(double, 3),
    functools.partial(double, value=3),
    Scale(2),
    Scale(2).method,
    Named("one"),
    Named("two"),
    closure(),
    len,
    sum,
    dict,
    json.loads,
    None,
]


def test_fingerprints_tell_functions_apart_and_are_json() -> None:
    texts = [json.dumps(function_fingerprint(function)) for function in KINDS]
    assert len(set(texts)) == len(KINDS)
    assert all(len(text) < 200 for text in texts)
    assert json.loads(texts[0]) == function_fingerprint(double)


def test_arguments_of_partials_count() -> None:
    assert function_fingerprint(functools.partial(double, 3)) != function_fingerprint(functools.partial(double, 4))
    one, other = functools.partial(double, a=1, b=2), functools.partial(double, b=2, a=1)
    assert function_fingerprint(one) == function_fingerprint(other)


def test_an_object_in_a_partial_is_the_same_wherever_it_lies() -> None:
    one, other = object(), object()
    assert repr(one) != repr(other)
    assert function_fingerprint(functools.partial(double, one)) == function_fingerprint(functools.partial(double, other))


@pytest.mark.parametrize("hash_seed", ["0", "77"])
def test_fingerprints_are_the_same_in_another_process(hash_seed: str) -> None:
    program = (
        "import json; from tests.state.test_schema import KINDS, function_fingerprint as f; print(json.dumps([f(one) for one in KINDS]))"
    )
    environ = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=15, env=environ, cwd=ROOT)
    assert json.loads(done.stdout) == [function_fingerprint(function) for function in KINDS]


def test_an_own_fingerprint_is_taken_and_checked() -> None:
    assert object_fingerprint(Named("x")) == {"name": "x", "sizes": [1, 2]}

    class Bad:
        def fingerprint(self) -> dict[str, Any]:
            return {"handle": object()}

    with pytest.raises(ConfigError, match=r"Bad.fingerprint\(\): expected JSON-compatible data, got .*not JSON serializable"):
        object_fingerprint(Bad())


@given(value=json_values)
def test_json_values_are_returned_as_they_are(value: Any) -> None:
    assert require_json(value, where="test") == value


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", {("a", "b"): 1}])
def test_what_json_refuses_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^somewhere: expected JSON-compatible data, got"):
        require_json(value, where="somewhere")
