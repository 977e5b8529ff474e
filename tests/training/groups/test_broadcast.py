"""Tensors of rank 0 reach the other ranks whatever they look like; what waits for the other ranks leaves no roll call open."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.ranks import run_cases

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_cases("tests.training.group_cases", tmp_path_factory.mktemp("groups"))


def test_tensors_of_any_dtype_and_strides_are_those_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:  # gloo writes a tensor with gaps over what lies behind it, and refuses int16 and float8
        assert [name for name, is_same in rank["any_layout"].items() if not is_same] == []
        assert len(rank["any_layout"]) == 11


def test_models_that_differ_in_a_frozen_part_are_refused(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        kind, message = rank["other_frozen_part"]
        assert kind == "SynchronizationError"
        assert message.startswith(f"broadcast_model: on dp_rank {number}: expected parameters and buffers of the same names")


def test_a_roll_call_that_everybody_answered_is_closed(ranks: list[dict[str, Any]]) -> None:
    assert [rank["roll_call_in_time"] for rank in ranks] == [False, False]  # else every later wait of 6 s would be the last
