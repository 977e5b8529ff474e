"""Finds the rank on which a gradient stopped being finite: after averaging, every rank holds the same NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

__all__ = ["NonFiniteWatch"]


class NonFiniteWatch:
    """Looks, while armed, at every gradient that a backward pass of this rank makes, before it is added to others or averaged.

    It is armed after a step that was not finite, and only then: in a healthy run it costs nothing.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Parameter]) -> None:
        self._names = names
        self._parameters = parameters
        self._handles: list[RemovableHandle] = []
        self._found: dict[int, Tensor] = {}

    def arm(self) -> None:
        """Look at the gradients of the coming backward passes, up to the next `arm` or `disarm`."""
        self.disarm()
        for index, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_hook(self._note(index)))  # type: ignore[no-untyped-call]

    def disarm(self) -> None:
        """Look no longer, and forget what was seen."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._found = {}

    def first(self) -> str | None:
        """Return the name of the first parameter, in the model's order, with a gradient that was not finite here."""
        return next((self._names[index] for index in sorted(self._found) if self._found[index]), None)

    def _note(self, index: int) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            bad = ~torch.isfinite(gradient).all()
            self._found[index] = self._found[index] | bad if index in self._found else bad

        return note
