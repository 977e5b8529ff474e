"""Takes a state dict apart into tensors and JSON, and puts it together again, without pickle.

    {"lr": 0.1, "betas": (0.9, 0.99), 0: tensor}
        -> {"optimizer/0": tensor}
        -> {"dict": [["lr", 0.1], ["betas", {"tuple": [0.9, 0.99]}], [0, {"tensor": "optimizer/0"}]]}

Every JSON object made here has one key, which names the kind of what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from aioloader.errors import ConfigError
from aioloader.protocols import Json

__all__ = ["join_state", "split_state"]


def split_state(state: Any, name: str) -> tuple[dict[str, Tensor], Json]:
    """Return the tensors in `state`, each under a unique key that begins with `name`, and the rest as JSON.

    Numbers, strings, booleans, None, lists, tuples, counters and dicts with any such keys come back equal and of the same type
    (a subclass of dict or of a number as its base).

    Raises:
        ConfigError: The state holds something else, which only pickle could save.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(state, name, tensors)


def join_state(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `split_state` took apart, with `tensors` in their places."""
    if isinstance(tree, list):
        return [join_state(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "tuple":
        return tuple(join_state(item, tensors) for item in value)
    pairs = {join_state(key, tensors): join_state(item, tensors) for key, item in value}
    return Counter(pairs) if kind == "counter" else pairs


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Json:
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, Tensor):
        return {"tensor": _store(value, path, tensors)}
    if isinstance(value, list):
        return [_encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = [[_encode(key, path, tensors), _encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    raise ConfigError(
        f"checkpoint, {path}",
        expected="tensors, numbers, strings, None, lists, tuples and dicts",
        got=type(value).__name__,
        do="leave it out of state_dict(), or save it in one of these forms",
    )


def _store(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    key = path
    while key in tensors:
        key += "'"
    tensors[key] = tensor
    return key
