"""Where this rank stands, according to a torch DeviceMesh or to Megatron's parallel state. Nothing is imported: both are asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aioloader.errors import ConfigError
from aioloader.order.layout import AXES, DATA_AXES, Place

__all__ = ["device_mesh_places", "megatron_coordinates"]

_DEVICE_MESH: Final = "Mesh.from_device_mesh(device_mesh)"
_MEGATRON: Final = "Mesh.from_megatron(parallel_state)"
_MEGATRON_NAMES: Final = {
    "dp": "data_parallel",
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
}
_SINCE_MEGATRON_CORE: Final = ("cp", "ep")
"""Axes that older versions do not know: then there is one rank on them."""


def device_mesh_places(device_mesh: Any, names: Mapping[str, str]) -> list[Place]:
    """Return this rank's coordinates on the named axes of a DeviceMesh, outermost first.

    Raises:
        ConfigError: It has no names or unknown ones, no data-parallel axis, or this rank is not in it.
    """
    for ours in names.values():
        if ours not in AXES:
            listed = ", ".join(AXES)
            raise ConfigError("Mesh.from_device_mesh(names=)", expected=f"axes out of {listed}", got=repr(ours), do="map each name to one")
    given = getattr(device_mesh, "mesh_dim_names", None)
    if not given:
        do = "make it with init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
        raise ConfigError(_DEVICE_MESH, expected="a DeviceMesh with named axes", got=f"{type(device_mesh).__name__} without names", do=do)
    axes = [_our_name(name, names) for name in given]
    if not any(axis in DATA_AXES and axis != "ep" for axis in axes):
        raise ConfigError(
            _DEVICE_MESH,
            expected="a data-parallel axis: dp, or dp_replicate and dp_shard",
            got=", ".join(map(repr, given)),
            do="pass the whole mesh, not a slice of it; give it a dp axis of size 1 if all ranks shall get the same data",
        )
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(
            _DEVICE_MESH,
            expected="a mesh that this rank is part of",
            got=f"a mesh over ({', '.join(map(repr, given))}) without it",
            do="load data only on ranks that are in the mesh, or make the mesh over all ranks",
        )
    return [Place(axis, int(coordinate[dim]), int(device_mesh.size(dim))) for dim, axis in enumerate(axes)]


def _our_name(name: str, names: Mapping[str, str]) -> str:
    axis = names.get(name, name)
    if axis not in AXES:
        # No guess at "fsdp" and the like: in some frameworks such an axis contains the context-parallel one.
        raise ConfigError(
            _DEVICE_MESH,
            expected=f"axes named {', '.join(AXES)}",
            got=repr(name),
            do=f'say what it is, e.g. names={{"{name}": "dp"}}, or pass the mesh that the data are dealt by',
        )
    return axis


def megatron_coordinates(parallel_state: Any) -> dict[str, int]:
    """Return the fields of this rank's `Mesh` according to `megatron.core.parallel_state`, or anything with its functions.

    The data-parallel group is the one without context-parallel peers, Megatron's default; expert-parallel peers are in it.

    Raises:
        ConfigError: A function is missing, or the model-parallel groups were not made yet.

    Source: `megatron/core/parallel_state.py`; `get_context_parallel_*` and `get_expert_model_parallel_*` are not in old versions.
    """
    is_ready = getattr(parallel_state, "model_parallel_is_initialized", None)
    if callable(is_ready) and not is_ready():
        do = "call initialize_model_parallel(...) first"
        raise ConfigError(_MEGATRON, expected="model-parallel groups that were made", got="none yet", do=do)
    fields: dict[str, int] = {}
    for axis, name in _MEGATRON_NAMES.items():
        rank = getattr(parallel_state, f"get_{name}_rank", None)
        size = getattr(parallel_state, f"get_{name}_world_size", None)
        if callable(rank) and callable(size):
            fields |= {f"{axis}_rank": int(rank()), f"{axis}_size": int(size())}
        elif axis not in _SINCE_MEGATRON_CORE:
            raise ConfigError(
                _MEGATRON,
                expected=f"get_{name}_rank and get_{name}_world_size",
                got=getattr(parallel_state, "__name__", type(parallel_state).__name__),
                do="pass the module megatron.core.parallel_state",
            )
    return fields
