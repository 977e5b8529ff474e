"""DataParallelGroup on one rank: it resolves, it checks, and it needs no process group."""

from __future__ import annotations

import pytest
import torch

from aioloader.errors import ConfigError, SynchronizationError
from aioloader.order.mesh import Mesh
from aioloader.training.dp_group import DataParallelGroup, is_distributed, resolve_mesh


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
