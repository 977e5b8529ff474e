"""The float32 originals of the parameters, and their narrow copies that the model computes with.

    model parameter    bfloat16     forward and backward use it; its .grad is bfloat16
    master             float32      the optimizer owns it; its .grad is float32

A parameter that stays float32 is its own master. Everything here runs over lists of tensors at once (`torch._foreach_*`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from aioloader.errors import ConfigError

__all__ = ["KeepFloat32", "MasterParameters", "local_tensor", "norm_or_router"]

KeepFloat32: TypeAlias = Callable[[str, Parameter], bool]
"""(qualified name, parameter) -> whether the model computes with it in float32."""

_NORMS_AND_ROUTERS = ("norm", "router", "gate.weight", "gate.bias")


def norm_or_router(name: str, parameter: Parameter) -> bool:
    """Return whether the last module in `name` is called like a normalisation (`norm`, `ln_1`, `layernorm`) or a router of experts.

    A layer whose parameters stay float32 must accept activations of another dtype, as those that compute in float32 inside do.
    """
    last = ".".join(name.lower().split(".")[-2:])
    return last.startswith("ln_") or any(word in last for word in _NORMS_AND_ROUTERS)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a `DTensor`, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class MasterParameters:
    """Masters of the trainable parameters of `model`, each one once however often it is used.

    Making it casts the floating-point parameters of the model, in place, to `compute_dtype`, frozen ones too; buffers stay as they
    are. A float32 parameter gives its memory to its master, so that no second float32 copy is ever made.

    Attributes:
        names: Qualified names, in the order of `model.named_parameters()`.
        compute: The model's parameters, in that order.
        masters: Their masters, float32, in that order.

    Raises:
        ConfigError: Nothing is trainable, or a trainable parameter is not of real floating-point numbers. Nothing was cast.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, keep_fp32: KeepFloat32 | None) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        _check_trainable(named)
        self.compute_dtype = compute_dtype
        self.names = [name for name, _ in named]
        self.compute = [parameter for _, parameter in named]
        floating = [(name, parameter) for name, parameter in model.named_parameters() if parameter.is_floating_point()]
        kept = {id(parameter) for name, parameter in floating if keep_fp32 is not None and keep_fp32(name, parameter)}
        dtypes = {id(parameter): torch.float32 if id(parameter) in kept else compute_dtype for _, parameter in floating}
        self.masters = [_make_master(parameter, dtypes[id(parameter)]) for parameter in self.compute]
        for _, parameter in floating:
            _cast_in_place(parameter, dtypes[id(parameter)])
        self._index = {id(parameter): index for index, parameter in enumerate(self.compute)}
        self._apart = [(one, master) for one, master in zip(self.compute, self.masters, strict=True) if one is not master]

    def named_masters(self) -> list[tuple[str, Parameter]]:
        """Return (qualified name, master) pairs, which a torch optimizer takes as they are."""
        return list(zip(self.names, self.masters, strict=True))

    def master_of(self, tensor: Tensor) -> Tensor:
        """Return the master of one of the model's trainable parameters; any other tensor as it is."""
        index = self._index.get(id(tensor))
        return tensor if index is None else self.masters[index]

    def assign_gradients(self, gradients: Iterable[tuple[Parameter, Tensor]]) -> list[int]:
        """Leave each gradient, as float32, in `master.grad` and return the indexes of those parameters.

        A float32 gradient is taken as it is, any other is cast. The `.grad` of the model's parameters are let go.

        Args:
            gradients: (parameter of the model, its gradient of the same shape).

        Raises:
            ConfigError: A gradient has another shape than its parameter, or no floating-point dtype, or the parameter has no master.
                No master has got a gradient then.
        """
        found = {self._checked_index(parameter, gradient): _placed_as(parameter, gradient) for parameter, gradient in gradients}
        wide = {index: one if one.dtype == torch.float32 else torch.empty_like(self.masters[index]) for index, one in found.items()}
        narrow = [index for index, one in found.items() if one is not wide[index]]
        if narrow:
            torch._foreach_copy_([local_tensor(wide[index]) for index in narrow], [local_tensor(found[index]) for index in narrow])
        self.zero_grad()
        for index, gradient in wide.items():
            self.masters[index].grad = gradient.detach()
        return sorted(wide)

    @torch.no_grad()
    def copy_to_compute(self) -> None:
        """Make every parameter of the model `master.to(dtype)`, rounded to the nearest."""
        if self._apart:
            torch._foreach_copy_([local_tensor(one) for one, _ in self._apart], [local_tensor(master) for _, master in self._apart])

    def zero_grad(self) -> None:
        """Drop the gradients of the model's parameters and of the masters."""
        for tensor in (*self.compute, *self.masters):
            tensor.grad = None

    @torch.no_grad()
    def load(self, masters: Mapping[str, Tensor]) -> None:
        """Take over the values of `masters`, one for each name, and make the model's parameters of them."""
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(masters[name])
        self.copy_to_compute()

    def _checked_index(self, parameter: Parameter, gradient: Tensor) -> int:
        index = self._index.get(id(parameter))
        if index is None:
            raise ConfigError(
                "gradients",
                expected="those of parameters that were trainable when the masters were made",
                got=f"one of a parameter of shape {list(parameter.shape)} without a master",
                do="make a new MixedPrecisionManager after changing requires_grad",
            )
        if gradient.shape != parameter.shape or not gradient.is_floating_point() or gradient.layout != torch.strided:
            raise ConfigError(
                f"gradient of {self.names[index]}",
                expected=f"a dense floating-point tensor of shape {list(parameter.shape)}",
                got=f"{str(gradient.dtype).removeprefix('torch.')}{list(gradient.shape)}, {gradient.layout}",
                do="give the gradient of this parameter itself",
            )
        return index


def _check_trainable(named: Sequence[tuple[str, Parameter]]) -> None:
    if not named:
        raise ConfigError("model", expected="trainable parameters", got="none", do="set requires_grad before making the manager")
    for name, parameter in named:
        if not parameter.is_floating_point():
            do = "freeze it, or train it without a MixedPrecisionManager"
            raise ConfigError(f"parameter {name}", expected="floating-point numbers", got=str(parameter.dtype), do=do)


def _make_master(parameter: Parameter, compute_dtype: torch.dtype) -> Parameter:
    if compute_dtype == torch.float32:
        return parameter  # to be cast
    master = Parameter(parameter.detach().float())
    master.__dict__.update(parameter.__dict__)  # marks such as Megatron's tensor_model_parallel
    return master


def _cast_in_place(parameter: Parameter, dtype: torch.dtype) -> None:
    """Cast one object that modules, hooks and optimizers know, and drop its gradient."""
    parameter.grad = None
    if parameter.dtype == dtype:
        return
    if not hasattr(parameter, "to_local"):
        parameter.data = parameter.data.to(dtype)
        return
    new = Parameter(parameter.detach().to(dtype), parameter.requires_grad)  # the data of a DTensor cannot be exchanged
    new.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]


def _placed_as(parameter: Parameter, gradient: Tensor) -> Tensor:
    """Return a `DTensor` gradient laid out over the ranks as its parameter is: of a replicated one it may be a partial sum."""
    placements = getattr(parameter, "placements", None)
    if placements is None or getattr(gradient, "placements", placements) == placements:
        return gradient
    placed: Tensor = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return placed
