"""What of a training run a checkpoint holds: taken apart into tensors and JSON, compared, and put back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aioloader.errors import ResumeError
from aioloader.protocols import Json
from aioloader.training.checkpoints.state_tree import split_state

__all__ = ["Snapshot", "Stateful", "TrainingParts"]


class Stateful(Protocol):
    """What a checkpoint needs of a learning-rate scheduler and of a precision manager."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of one rank after `step` optimizer steps.

    Attributes:
        step: Optimizer steps done.
        tensors: Of model, optimizer, scheduler and precision manager, by unique name; empty but on the rank that writes them.
        tree: What else their states hold, as JSON.
        loader_state: The loader state of this rank.
        progress: What the trainer adds.
    """

    step: int
    tensors: Mapping[str, Tensor]
    tree: Json
    loader_state: Json
    progress: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """The parts of a training run that have state and are the same on all ranks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Stateful | None = None
    precision: Stateful | None = None

    def snapshot(self, step: int, loader_state: Json, progress: Mapping[str, Json] | None, *, whole: bool, copied: bool) -> Snapshot:
        """Return the state as of now.

        Args:
            step: Optimizer steps done.
            loader_state: Of this rank.
            progress: More JSON-compatible data.
            whole: False leaves out all but the loader state, on ranks that write no more.
            copied: With its tensors in CPU memory of their own, so that training may go on; else they are those of the parts.

        Raises:
            ConfigError: A state cannot be saved without pickle.
        """
        tensors, tree = self._take_apart() if whole else ({}, None)
        if copied:
            tensors = {name: _copy(tensor) for name, tensor in tensors.items()}
            loader_state = copy.deepcopy(loader_state)
        return Snapshot(step=step, tensors=tensors, tree=tree, loader_state=loader_state, progress=dict(progress or {}))

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Load what `snapshot` took apart, once all of it was compared.

        Raises:
            ResumeError: It is the state of other parts; lists each difference. Nothing was changed.
        """
        self._check_same(state)
        for name, part in self._optional().items():
            if part is not None:
                part.load_state_dict(state[name])
        model_state = self.model.state_dict()
        model_state.update(state["model"])  # keeps the versions of the modules, which travel as an attribute
        self.model.load_state_dict(model_state)

    def _optional(self) -> dict[str, Stateful | None]:
        # The precision manager first: it compares what only it knows, before anything is changed.
        return {"precision": self.precision, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def _classes(self) -> dict[str, str]:
        """Return whose states they are: torch's optimizers and schedulers take those of others without a word."""
        return {name: type(part).__name__ for name, part in self._optional().items() if part is not None}

    def _take_apart(self) -> tuple[dict[str, Tensor], Json]:
        states: dict[str, Any] = {"model": self.model.state_dict()}
        states |= {name: part and part.state_dict() for name, part in self._optional().items()}
        states["classes"] = self._classes()
        tensors: dict[str, Tensor] = {}
        trees: dict[str, Json] = {}
        for name, state in states.items():
            found, trees[name] = split_state(state, name)
            tensors |= found
        # The outer dict is encoded like the inner ones, so that one call puts all of it together.
        return tensors, {"dict": [[name, tree] for name, tree in trees.items()]}

    def _check_same(self, state: Mapping[str, Any]) -> None:
        saved, present = _describe(state["model"]), _describe(self.model.state_dict())
        names = [*present, *(name for name in saved if name not in present)]
        differences: list[tuple[str, object, object]] = [
            (f"model, {name}", saved.get(name, "nothing"), present.get(name, "nothing"))
            for name in names
            if saved.get(name) != present.get(name)
        ]
        for name in self._optional():
            saved_one, present_one = state["classes"].get(name, "none"), self._classes().get(name, "none")
            if saved_one != present_one:
                differences.append((name, saved_one, present_one))
        if self.optimizer is not None and state["optimizer"] is not None:
            saved_groups, groups = (_group_sizes(groups) for groups in (state["optimizer"]["param_groups"], self.optimizer.param_groups))
            if saved_groups != groups:
                differences.append(("optimizer, parameters in each group", saved_groups, groups))
        if differences:
            raise ResumeError(differences, do="Build the model, optimizer and scheduler as in the run that saved it")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _describe(state: Mapping[str, Any]) -> dict[str, str]:
    def describe(value: Any) -> str:
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else "extra state"

    return {name: describe(value) for name, value in state.items()}


def _group_sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]
