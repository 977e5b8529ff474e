"""DataParallelGroup: on one rank it needs no process group; on four it finds the ranks that belong together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioloader.errors import ConfigError, SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.training.groups.dp_group import DataParallelGroup, is_distributed, resolve_mesh
from tests.training.gradient_cases import gradients, network, network_loss
from tests.training.ranks import run_cases

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases("tests.training.mesh_cases", tmp_path_factory.mktemp("mesh"))


def test_a_mesh_comes_from_the_argument_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resolve_mesh(Mesh(dp_rank=2, dp_size=3)) == Mesh(dp_rank=2, dp_size=3)
    assert resolve_mesh(None) == Mesh(dp_rank=1, dp_size=2)


def test_several_ranks_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_distributed()
    with pytest.raises(ConfigError, match=r"expected a process group for dp_size 2, got none in this process; call torch\.distributed"):
        DataParallelGroup.resolve()


def test_alone_numbers_stay_as_they_are() -> None:
    alone = DataParallelGroup.resolve(Mesh())
    assert (alone.rank, alone.size, alone.control_device) == (0, 1, torch.device("cpu"))
    assert alone.reduce_numbers([1.0, 2.0**53, -3.5], "test") == [1.0, 2.0**53, -3.5]


@pytest.mark.parametrize("error", [OSError("full"), SynchronizationError("other", "missing"), KeyboardInterrupt()])
def test_a_block_that_fails_raises_its_own_error(error: BaseException) -> None:
    alone = DataParallelGroup.resolve(Mesh())
    with pytest.raises(type(error)) as caught, alone.together("test"):
        raise error
    assert caught.value is error


def test_ranks_of_one_tensor_parallel_place_form_a_group(results: dict[str, Any]) -> None:
    for rank, found in enumerate(results["four_ranks"]):
        case, members = found["tensor_parallel"], [rank % 2, rank % 2 + 2]
        assert case["members"] == [members, rank // 2, 2]
        assert case["made_once"]
        assert case["total"] == [sum(members)]
        assert case["averaged"] == case["by_hand"] == 2 * [[sum(members) / 2]]


def test_parts_of_one_sequence_are_averaged_together(results: dict[str, Any]) -> None:
    for rank, found in enumerate(results["four_ranks"]):
        case = found["context_parallel"]
        assert case["members"] == [[0, 1] if rank < 2 else [2, 3], rank % 2, 2]
        assert case["across"] == [[0, 1, 2, 3], rank, 4]
        assert case["averaged"] == 2 * [[1.5]]
        assert case["alone"] == 2 * [[0.5 if rank < 2 else 2.5]]


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("twice", "got rank 2 and rank 3 both at dp 1/2, pp 0/2"),
        ("uneven", "got dp_size 2 on rank 0 and dp_size 3 on rank 3"),
        ("few", "got 4 of 5 for cp 0, tp 0, pp 0, ep 0, ranks [0, 1, 2, 3]"),
    ],
)
def test_misplaced_ranks_are_refused_on_all_ranks(results: dict[str, Any], case: str, part: str) -> None:
    for found in results["four_ranks"]:
        kind, message = found["misplaced"][case]
        assert kind == "ConfigError"
        assert part in message


def test_a_group_of_other_ranks_is_refused(results: dict[str, Any]) -> None:
    for found in results["four_ranks"]:
        assert found["group_of_others"][0] == "ConfigError"
        assert "give the group of the ranks that differ in dp_rank only" in found["group_of_others"][1]


def test_gradients_of_four_ranks_equal_those_of_one_process(results: dict[str, Any]) -> None:
    model = network()
    for index in range(8):
        (network_loss(model, index) / 4).backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    for found in results["four_ranks"]:
        assert found["gradients"] == results["four_ranks"][0]["gradients"]
        for name, values in expected.items():
            one, other = torch.tensor(found["gradients"][name]), torch.tensor(values)
            assert float((one - other).abs().max() / other.abs().max()) < 1e-6


def test_a_rank_that_makes_no_group_is_named(results: dict[str, Any]) -> None:
    for kind, message in results["absent"][:3]:
        assert kind == "SynchronizationError"
        assert "expected the coordinates of all 4 ranks, got none from rank 3 within 0.5 s" in message


def test_a_rank_that_died_is_named_and_not_waited_for_again(results: dict[str, Any]) -> None:
    for rank, found in enumerate(results["dead"][:3]):
        (first, _), (second, message), (third, again) = found["found"]
        assert (first, second, third) == ("nothing", "SynchronizationError", "SynchronizationError")
        assert message.startswith(f"sync_gradients, step 1, bucket 1 of 1 (float32[3], p): on dp_rank {rank}: ")
        assert "got no sign of dp_rank 3 within" in message
        assert "got dp_rank 3 missing in an earlier round; start all ranks again from the last checkpoint" in again
        assert found["gradients"] == {"p": None}
