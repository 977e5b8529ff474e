"""Mesh: coordinates that check themselves, by hand, from torchrun's environment, a layout, a DeviceMesh or Megatron."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ConfigError
from aioloader.order.lanes import LaneMap
from aioloader.order.layout import Layout
from aioloader.order.mesh import Mesh
from tests.order.layout_cases import layouts

AXES = ("dp", "tp", "pp", "cp", "ep")


def test_default_is_a_single_rank() -> None:
    assert Mesh() == Mesh(dp_rank=0, dp_size=1)
    assert Mesh().describe() == "a single rank"


def test_frozen_slotted_and_keyword_only() -> None:
    mesh = Mesh(dp_rank=1, dp_size=2)
    with pytest.raises(dataclasses.FrozenInstanceError, match="dp_rank"):
        mesh.dp_rank = 0  # type: ignore[misc]
    assert not hasattr(mesh, "__dict__")
    with pytest.raises(TypeError, match="positional"):
        Mesh(1, 2)  # type: ignore[call-arg]


@given(axis=st.sampled_from(AXES), rank=st.integers(-3, 12), size=st.integers(-3, 12))
def test_a_rank_is_accepted_exactly_when_inside_its_axis(axis: str, rank: int, size: int) -> None:
    options: dict[str, Any] = {f"{axis}_rank": rank, f"{axis}_size": size}
    if size >= 1 and 0 <= rank < size:
        assert getattr(Mesh(**options), f"{axis}_rank") == rank
    else:
        with pytest.raises(ConfigError, match=rf"^Mesh\({axis}_(rank|size)=\): expected an integer"):
            Mesh(**options)


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
@pytest.mark.parametrize("field", ["dp_rank", "dp_size", "ep_rank"])
def test_what_is_not_an_integer_is_refused(field: str, value: object) -> None:
    options: dict[str, Any] = {"dp_size": 4, "ep_size": 4, field: value}
    with pytest.raises(ConfigError, match=rf"Mesh\({field}=\): expected an integer.*got {value!r}"):
        Mesh(**options)


@given(size=st.integers(1, 10_000), data=st.data())
def test_from_env_is_pure_data_parallel(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    mesh = Mesh.from_env({"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"})
    assert mesh == Mesh(dp_rank=rank, dp_size=size)


def test_from_env_without_torchrun_is_a_single_rank() -> None:
    assert Mesh.from_env({"HOME": "/"}) == Mesh()


def test_from_env_reads_the_environment_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Mesh.from_env() == Mesh(dp_rank=3, dp_size=4)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "expected both RANK and WORLD_SIZE .* only RANK='0'; start the script with torchrun"),
        ({"WORLD_SIZE": "2"}, "only WORLD_SIZE='2'"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "an integer in RANK, got 'one'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "an integer in WORLD_SIZE, got ''"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"an integer from 0 to 1 \(dp_size is 2\), got 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "an integer, 1 or more, got 0"),
    ],
)
def test_from_env_refuses_what_is_not_a_job(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mesh.from_env(environ)


def test_describe_names_the_axes_in_use() -> None:
    assert Mesh(dp_rank=1, dp_size=4, tp_size=2).describe() == "dp 1/4, tp 0/2"
    assert repr(Mesh(dp_rank=1, dp_size=4)).startswith("Mesh(dp_rank=1, dp_size=4, tp_rank=0")


def test_importing_the_mesh_imports_no_torch() -> None:
    code = "import sys, aioloader.order.mesh; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def dp_ranks(**sizes: int) -> list[int]:
    world_size = Layout.of(sizes).world_size
    return [Mesh.from_layout(rank, sizes, world_size).dp_rank for rank in range(world_size)]


def test_from_layout_goes_by_coordinates_and_not_by_a_remainder_of_the_rank() -> None:  # F7, A063, B021
    assert dp_ranks(dp=4, tp=2) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert dp_ranks(tp=2, dp=4) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert dp_ranks(pp=2, dp=2, cp=1, tp=2) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert dp_ranks(dp=2, tp=2, cp=2) == [0] * 4 + [1] * 4


def test_from_layout_gives_every_coordinate() -> None:
    mesh = Mesh.from_layout(11, {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2})
    assert mesh == Mesh(pp_rank=1, pp_size=2, dp_rank=1, dp_size=4, tp_rank=1, tp_size=2)
    assert mesh.describe() == "dp 1/4, tp 1/2, pp 1/2"


def test_data_parallel_ranks_count_replicate_major_in_any_order_of_the_axes() -> None:
    assert dp_ranks(dp_replicate=2, dp_shard=3) == [0, 1, 2, 3, 4, 5]
    assert dp_ranks(dp_shard=3, dp_replicate=2) == [0, 3, 1, 4, 2, 5]


def test_an_ep_axis_counts_as_data_parallel() -> None:
    assert dp_ranks(dp=2, ep=2, tp=2) == [0, 0, 1, 1, 2, 2, 3, 3]
    mesh = Mesh.from_layout(6, {"dp": 2, "ep": 2, "tp": 2})
    assert mesh == Mesh(dp_rank=3, dp_size=4, ep_rank=1, ep_size=2, tp_size=2)
    assert mesh.num_peers == 2


def test_from_layout_refuses_a_wrong_world_and_a_rank_outside() -> None:
    with pytest.raises(
        ConfigError, match=r"^Mesh\.from_layout\(sizes=\): expected sizes whose product is the world size, 16, got dp=4, tp=2"
    ):
        Mesh.from_layout(0, {"dp": 4, "tp": 2}, 16)
    for rank in (-1, 8):
        with pytest.raises(ConfigError, match=rf"^Mesh\.from_layout\(rank=\): expected a rank from 0 to 7 \(dp=4, tp=2\), got {rank}"):
            Mesh.from_layout(rank, {"dp": 4, "tp": 2})


def test_from_env_with_sizes() -> None:  # A090
    environ = {"RANK": "5", "WORLD_SIZE": "8"}
    assert Mesh.from_env(environ, sizes={"dp": -1, "cp": 2, "tp": 2}) == Mesh(dp_rank=1, dp_size=2, cp_size=2, tp_rank=1, tp_size=2)
    assert Mesh.from_env(environ, sizes={"dp": -1, "cp": 1, "tp": 1}) == Mesh(dp_rank=5, dp_size=8)
    assert Mesh.from_env({}, sizes={"dp": -1, "tp": 1}) == Mesh()


def test_from_env_refuses_sizes_that_do_not_fit_the_job() -> None:
    with pytest.raises(
        ConfigError, match=r"^Mesh\.from_env\(sizes=\): expected sizes whose product divides the world size, 8, got dp=-1, tp=3"
    ):
        Mesh.from_env({"RANK": "5", "WORLD_SIZE": "8"}, sizes={"dp": -1, "tp": 3})
    with pytest.raises(ConfigError, match=r"^Mesh\.from_env\(sizes=\): .* the world size, 1, got dp=1, tp=2"):
        Mesh.from_env({}, sizes={"dp": 1, "tp": 2})
    with pytest.raises(ConfigError, match=r"^Mesh\.from_env\(\): expected a rank from 0 to 7 .* got 9"):
        Mesh.from_env({"RANK": "9", "WORLD_SIZE": "8"}, sizes={"dp": 8})


class NamedMesh:
    """What `from_device_mesh` asks of a DeviceMesh, for one rank; rows of ranks as in torch, outermost axis first."""

    def __init__(self, rank: int, sizes: dict[str, int]) -> None:
        self.mesh_dim_names = tuple(sizes) or None
        self._sizes = tuple(sizes.values())
        self._rank = rank

    def size(self, dim: int) -> int:
        return self._sizes[dim]

    def get_coordinate(self) -> list[int] | None:
        places = Layout(tuple(zip(map(str, range(9)), self._sizes, strict=False)))
        return [place.rank for place in places.places(self._rank)] if self._rank < places.world_size else None


@given(layout=layouts(), data=st.data())
def test_from_device_mesh_is_from_layout(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert Mesh.from_device_mesh(NamedMesh(rank, dict(layout.sizes))) == Mesh.from_layout(rank, dict(layout.sizes))


def test_from_device_mesh_takes_other_names() -> None:
    sizes = {"stage": 2, "data": 2, "fsdp": 2, "ulysses": 2, "ring": 2}
    names = {"stage": "pp", "data": "dp", "fsdp": "dp", "ulysses": "cp", "ring": "cp"}
    mesh = Mesh.from_device_mesh(NamedMesh(0b01101, sizes), names=names)
    assert mesh == Mesh(pp_rank=0, pp_size=2, dp_rank=0b11, dp_size=4, cp_rank=0b01, cp_size=4)


@pytest.mark.parametrize(
    ("mesh", "names", "message"),
    [
        (
            NamedMesh(0, {}),
            None,
            r"\(device_mesh\): expected a DeviceMesh with named axes, got NamedMesh without names; make it with init_",
        ),
        (object(), None, r"\(device_mesh\): expected a DeviceMesh with named axes, got object without names"),
        (NamedMesh(0, {"fsdp": 2, "tp": 2}), None, r"\(device_mesh\): .* got 'fsdp'; say what it is, e.g. names=\{\"fsdp\": \"dp\"\}"),
        (NamedMesh(0, {"tp": 2}), None, r"\(device_mesh\): expected a data-parallel axis.* got 'tp'; pass the whole mesh, not a slice"),
        (NamedMesh(4, {"dp": 2, "tp": 2}), None, r"\(device_mesh\): expected a mesh that this rank is part of.* \('dp', 'tp'\) without it"),
        (NamedMesh(0, {"x": 2}), {"x": "data"}, r"\(names=\): expected axes out of pp, .*, got 'data'; map each name to one"),
    ],
)
def test_from_device_mesh_refuses_what_it_cannot_place(mesh: object, names: dict[str, str] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^Mesh\.from_device_mesh{message}"):
        Mesh.from_device_mesh(mesh, names=names)


@pytest.mark.parametrize("sizes", [{"dp": 4, "tp": 2}, {"dp_shard": 2, "tp": 2, "dp_replicate": 2}, {"pp": 2, "dp": 2, "cp": 2}])
def test_from_a_device_mesh_of_torch(sizes: dict[str, int]) -> None:  # A063
    # A group that communicates with nobody, so that one process plays every rank in turn.
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            device_mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            assert Mesh.from_device_mesh(device_mesh) == Mesh.from_layout(rank, sizes, 8)
        finally:
            dist.destroy_process_group()


class FakeMegatron:
    """Megatron's parallel state for one rank, with the names of megatron.core.parallel_state."""

    def __init__(self, rank: int, sizes: dict[str, int], *, expert: tuple[int, int] = (0, 1)) -> None:
        self.at = {place.axis: (place.rank, place.size) for place in Layout.of(sizes).places(rank)}
        self.expert = expert

    def model_parallel_is_initialized(self) -> bool:
        return True

    def get_data_parallel_rank(self, with_context_parallel: bool = False) -> int:
        rank, (cp_rank, cp_size) = self.at["dp"][0], self.at.get("cp", (0, 1))
        return rank * cp_size + cp_rank if with_context_parallel else rank

    def get_data_parallel_world_size(self, with_context_parallel: bool = False) -> int:
        return self.at["dp"][1] * (self.at.get("cp", (0, 1))[1] if with_context_parallel else 1)

    def get_tensor_model_parallel_rank(self) -> int:
        return self.at.get("tp", (0, 1))[0]

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.at.get("tp", (0, 1))[1]

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.at.get("pp", (0, 1))[0]

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.at.get("pp", (0, 1))[1]


class FakeMegatronCore(FakeMegatron):
    """A version that knows context and expert parallelism."""

    def get_context_parallel_rank(self) -> int:
        return self.at.get("cp", (0, 1))[0]

    def get_context_parallel_world_size(self) -> int:
        return self.at.get("cp", (0, 1))[1]

    def get_expert_model_parallel_rank(self) -> int:
        return self.expert[0]

    def get_expert_model_parallel_world_size(self) -> int:
        return self.expert[1]


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2, "cp": 2, "tp": 2}, {"dp": 4, "tp": 2}, {"dp": 8}])
def test_from_megatron_is_from_device_mesh(sizes: dict[str, int]) -> None:  # A002
    for rank in range(Layout.of(sizes).world_size):
        assert Mesh.from_megatron(FakeMegatronCore(rank, sizes)) == Mesh.from_device_mesh(NamedMesh(rank, sizes))


def test_from_megatron_deals_by_its_data_parallel_group() -> None:  # A062
    mesh = Mesh.from_megatron(FakeMegatron(3, {"dp": 4}))
    assert mesh == Mesh(dp_rank=3, dp_size=4)
    assert list(LaneMap(num_lanes=8, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size).served) == [3, 7]


def test_expert_groups_of_megatron_are_among_the_data_parallel_ranks_already() -> None:
    assert Mesh.from_megatron(FakeMegatronCore(5, {"dp": 8}, expert=(1, 4))) == Mesh(dp_rank=5, dp_size=8, ep_rank=1, ep_size=4)


def test_from_megatron_refuses_what_is_not_ready_or_not_megatron() -> None:
    state = FakeMegatron(0, {"dp": 4})
    state.model_parallel_is_initialized = lambda: False  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"^Mesh\.from_megatron\(parallel_state\): .* none yet; call initialize_model_parallel"):
        Mesh.from_megatron(state)
    with pytest.raises(
        ConfigError, match=r"expected get_data_parallel_rank and get_data_parallel_world_size, got sys; pass the module meg"
    ):
        Mesh.from_megatron(sys)
