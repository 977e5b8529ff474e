"""What a mixed-precision run saves, and how a state is compared with the run that is to take it over.

    {"format": 1, "compute_dtype": "bfloat16", "masters": {name: float32 tensor}, "optimizer": ..., "optimizer_class": "AdamW",
     "scheduler": ... or None, "scheduler_class": "LambdaLR", "loss_scale": {"rule": ..., ...} or None,
     "transforms": [{"name": ..., "counters": {...}}], ...}

Plain tensors and JSON-like values only. The narrow parameters are not in it: they are made of the masters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aioloader.errors import ResumeError

__all__ = ["FORMAT", "check_same", "dtype_name", "load_optimizer"]

FORMAT = 1

_HOW_IT_RUNS = ("fused", "foreach", "capturable")
"""Options of torch's optimizers that say how, not what is computed: those of this run hold, another device may lack the kernels."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return e.g. `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def check_same(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Compare two states in all that must agree, before anything is changed.

    Raises:
        ResumeError: They differ; each difference is listed with both sides.
    """
    if saved.get("format") != FORMAT:
        raise _refusal([("format", saved.get("format", "none"), FORMAT)])
    differences: list[tuple[str, object, object]] = []
    before, now = _describe(saved), _describe(present)
    for what in [*now, *(name for name in before if name not in now)]:
        if before.get(what) != now.get(what):
            differences.append((what, before.get(what, "nothing"), now.get(what, "nothing")))
    if differences:
        raise _refusal(differences)


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load `state` but keep how this optimizer runs (fused or not), which does not belong to the state."""
    groups: list[dict[str, Any]] = []
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**saved, **{option: own[option] for option in _HOW_IT_RUNS if option in own}})
    optimizer.load_state_dict({**state, "param_groups": groups})


def _describe(state: Mapping[str, Any]) -> dict[str, object]:
    masters: Mapping[str, Tensor] = state["masters"]
    loss_scale = state["loss_scale"]
    return {
        "compute_dtype": state["compute_dtype"],
        **{f"master {name}": f"{dtype_name(master.dtype)}{list(master.shape)}" for name, master in masters.items()},
        "optimizer": state["optimizer_class"],
        "parameters in each group": [len(group["params"]) for group in state["optimizer"]["param_groups"]],
        "scheduler": "none" if state["scheduler"] is None else state["scheduler_class"],
        "loss_scale": "none" if loss_scale is None else loss_scale["rule"],
        "transforms": [transform["name"] for transform in state["transforms"]],
    }


def _refusal(differences: Sequence[tuple[str, object, object]]) -> ResumeError:
    where = "MixedPrecisionManager.load_state_dict (expected as made here, got as saved)"
    return ResumeError(differences, where=where, do="Make the model and the manager as in the run that saved the state")
