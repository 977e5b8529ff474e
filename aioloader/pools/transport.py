"""How samples become bytes and come back: pickle protocol 5, with the memory of arrays and tensors beside the pickle.

    memory = pickle | pad | buffer 0 | pad | buffer 1 | ...        sizes = (pickle bytes, buffer 0 bytes, ...)

The buffers are written once, straight into shared memory, and viewed in place on the other side.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]

__all__ = ["Encoded", "decode", "encode", "write"]

_ALIGNMENT = 64  # a cache line; what vectorised kernels like best


class Encoded(NamedTuple):
    """Buffers to be written one after another, each at the next multiple of 64 bytes."""

    sizes: tuple[int, ...]
    buffers: Sequence[bytes | memoryview]
    nbytes: int


def encode(value: Any) -> Encoded:
    """Return `value` as bytes; arrays are not copied yet, so they must not change before `write`.

    Raises:
        Exception: Whatever pickling something inside `value` raises.
    """
    beside: list[pickle.PickleBuffer] = []
    try:
        main = _dump(pickle.Pickler, value, beside)
    except (pickle.PicklingError, AttributeError, TypeError):
        beside.clear()  # classes of the user's main module are known to cloudpickle only
        main = _dump(cloudpickle.Pickler, value, beside)
    buffers: list[bytes | memoryview] = [main, *(buffer.raw() for buffer in beside)]
    sizes = tuple(len(buffer) for buffer in buffers)
    return Encoded(sizes, buffers, sum(_padded(size) for size in sizes))


def decode(sizes: Sequence[int], memory: memoryview) -> Any:
    """Return the value; its arrays are views of `memory` and keep it alive."""
    main = memory[: sizes[0]]
    if len(sizes) == 1:
        return pickle.loads(main)
    beside = []
    at = _padded(sizes[0])
    for size in sizes[1:]:
        beside.append(memory[at : at + size])
        at += _padded(size)
    return pickle.loads(main, buffers=beside)


def write(encoded: Encoded, memory: memoryview) -> None:
    """Copy the buffers to where `decode` looks for them."""
    at = 0
    for buffer, size in zip(encoded.buffers, encoded.sizes, strict=True):
        memory[at : at + size] = buffer
        at += _padded(size)


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _dump(pickler_class: Any, value: Any, beside: list[pickle.PickleBuffer]) -> bytes:
    stream = io.BytesIO()
    pickler = pickler_class(stream, protocol=5, buffer_callback=beside.append)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor"):
        pickler.dispatch_table = _dispatch_table(torch)
    pickler.dump(value)
    return stream.getvalue()


def _dispatch_table(torch: Any) -> dict[type, Any]:
    global _table
    if _table is None:
        _table = {**cloudpickle.Pickler.dispatch_table, **copyreg.dispatch_table, torch.Tensor: _reduce_tensor}
    return _table


_table: dict[type, Any] | None = None


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a plain tensor to its memory; torch's own way goes through a file format and costs 100 us."""
    if tensor.device.type != "cpu" or tensor.layout is not sys.modules["torch"].strided or tensor.is_quantized:
        return tensor.__reduce_ex__(5)
    plain = tensor.detach().contiguous()
    memory = plain.reshape(-1).view(sys.modules["torch"].uint8).numpy() if plain.numel() else None
    return _rebuild_tensor, (memory, str(plain.dtype).removeprefix("torch."), tuple(plain.shape), tensor.requires_grad)


def _rebuild_tensor(memory: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind) if memory is None else torch.from_numpy(memory).view(kind).reshape(shape)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor
