"""Sums over many micro-batches: in which dtype they may be kept, and a warning where a narrow one loses what comes later."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from aioloader.errors import ConfigError

__all__ = ["LongSumWarning", "check_accumulate_dtype"]

_MOST_TERMS = 128
"""Half of where a bfloat16 sum of equal terms stands still: with 8 significant bits, 256 + 1 is 256."""


class LongSumWarning:
    """Warns once when more micro-batches are added up in bfloat16 or float16 than such a sum can hold.

    Args:
        parameters: The first one of a narrow dtype is watched.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._num_terms = 0
        self._dtype = torch.float32
        narrow = [parameter for parameter in parameters if parameter.dtype in (torch.bfloat16, torch.float16)]
        self.handles: list[RemovableHandle] = []
        if narrow:
            self._dtype = narrow[0].dtype
            handle = narrow[0].register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
            self.handles.append(handle)

    def begin_anew(self) -> None:
        """Begin the next sum."""
        self._num_terms = 0

    def _count(self, parameter: Tensor) -> None:
        self._num_terms += 1
        if self._num_terms == _MOST_TERMS + 1:
            self.handles.pop().remove()
            warnings.warn(
                f"GradientSynchronizer: more than {_MOST_TERMS} micro-batches are added up in {self._dtype}, where small terms are lost "
                "and a sum of equal terms stands still; give accumulate_dtype=torch.float32, or fewer micro-batches a step",
                stacklevel=2,
            )


def check_accumulate_dtype(dtype: torch.dtype | None, named: Sequence[tuple[str, Parameter]]) -> None:
    """Refuse sums in a dtype that cannot hold what is added.

    Raises:
        ConfigError: A parameter has a wider dtype, or this is not a floating-point one.
    """
    if dtype is None:
        return
    if not dtype.is_floating_point:
        raise ConfigError("accumulate_dtype", expected="a floating-point dtype", got=dtype, do="give torch.float32 or leave it out")
    for name, parameter in named:
        if torch.promote_types(dtype, parameter.dtype) != dtype:
            got = f"{parameter.dtype} for {name}"
            raise ConfigError("accumulate_dtype", expected=f"parameters that fit in {dtype}", got=got, do="give the widest of their dtypes")
