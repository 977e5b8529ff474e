"""State trees: apart and together again is the identity, through JSON and without pickle."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ConfigError
from aioloader.training.checkpoints.state_tree import join_state, split_state

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.text(), st.integers())
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner) | st.dictionaries(KEYS, st.integers()).map(Counter)
    ),
    max_leaves=10,
)


@given(state=STATES)
def test_apart_and_together_is_the_identity(state: Any) -> None:
    tensors, tree = split_state(state, "state")
    assert tensors == {}
    found = join_state(json.loads(json.dumps(tree)), tensors)
    assert repr(found) == repr(state)


@given(names=st.lists(st.text(alphabet="a/'", max_size=4) | st.integers(0, 3), unique=True, max_size=8))
def test_tensors_get_unique_keys_and_come_back_as_they_are(names: list[str | int]) -> None:
    state = {name: torch.tensor(number) for number, name in enumerate(names)} | {"deep": [{"a": torch.tensor(-1)}]}
    tensors, tree = split_state(state, "s")
    assert len(tensors) == len(state)
    assert all(key.startswith("s/") for key in tensors)
    found = join_state(json.loads(json.dumps(tree)), tensors)
    assert list(found) == list(state)
    assert all(found[name] is state[name] for name in names)


def test_subclasses_come_back_as_their_base() -> None:
    state = OrderedDict(lr=np.float64(0.1))
    found = join_state(json.loads(json.dumps(split_state(state, "s")[1])), {})
    assert type(found) is dict
    assert type(found["lr"]) is float
    assert found == {"lr": 0.1}


def test_what_only_pickle_could_save_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint, scheduler/lambdas/1: expected tensors, numbers, .* got function; leave it out"):
        split_state({"lambdas": [None, lambda step: step]}, "scheduler")
