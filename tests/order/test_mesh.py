"""Mesh: coordinates that check themselves, by hand and from torchrun's environment."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh

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
