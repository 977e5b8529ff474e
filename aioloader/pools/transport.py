"""How samples become bytes and come back: pickle protocol 5, with the memory of arrays and tensors beside the pickle.

    memory = pickle | pad | buffer 0 | pad | buffer 1 | ...        sizes = (pickle bytes, buffer 0 bytes, ...)

Samples of one kind travel as columns (see `columns.py`), one buffer per field. The buffers are written once, straight into
shared memory, and viewed in place on the other side.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import math
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle

from aioloader.pools.chunk import Room
from aioloader.pools.columns import Concatenation, from_flat, to_columns
from aioloader.sequences import Rows, SampleColumns

__all__ = ["Encoded", "decode", "encode", "encode_samples", "write"]

_MAIN_MODULE = b"\x8c\x08__main__"
"""How a pickle names the module of a class or function: opcode, length, text."""
_ALIGNMENT = 64  # a cache line; what vectorised kernels like best


class Encoded(NamedTuple):
    """Buffers to be written one after another, each at the next multiple of 64 bytes.

    `placed` are written elsewhere, each at an offset of the memory that `encode_samples` was given for them.
    """

    sizes: tuple[int, ...]
    buffers: Sequence[bytes | memoryview | Concatenation]
    nbytes: int
    placed: Sequence[tuple[Concatenation, int]] = ()

    @property
    def placed_nbytes(self) -> int:
        """Return the bytes of what is written elsewhere."""
        return sum(part.nbytes for part, _ in self.placed)


def encode(value: Any, *, stays_here: bool = False) -> Encoded:
    """Return `value` as bytes; arrays are not copied yet, so they must not change before `write`.

    With `stays_here` it is decoded in this very process: functions and classes of the main module are those then, not copies.

    Raises:
        Exception: Whatever pickling something inside `value` raises.
    """
    return _encoded(value, [], stays_here=stays_here)


def encode_samples(samples: Sequence[Any], rooms: Mapping[str, Room] | None = None) -> Encoded:
    """Return samples as bytes, in columns where that is possible: then decoding gives `SampleColumns`. Raises as `encode`.

    Columns that fit one of `rooms` are placed there.
    """
    columns = to_columns(samples)
    if columns is None:
        return encode(list(samples))
    parts: list[Concatenation] = []
    placed: list[tuple[Concatenation, int]] = []
    layout: list[Any] = []
    found = [_room_for(key, value, rooms) for key, value in zip(columns.keys or (None,), columns.values, strict=True)]
    num_parts = columns.num_concatenations - sum(room is not None for room in found)
    for value, room in zip(columns.values, found, strict=True):
        if not isinstance(value, Concatenation):
            layout.append(value)
        elif room is not None:
            dtype, shape, offset = room
            layout.append((_PLACED, dtype, (len(samples), *shape), offset, value.torch_dtype))
            placed.append((value, offset))
        else:
            first, place = value.arrays[0], len(parts) - num_parts  # counted from the end: the pickle's own buffers come first
            layout.append((_PART, first.dtype.str, first.shape[1:], place, value.torch_dtype, value.lengths))
            parts.append(value)
    return _encoded((columns.keys, len(samples), layout), parts, is_columns=True)._replace(placed=placed)


def _room_for(key: Any, value: Any, rooms: Mapping[str, Room] | None) -> Room | None:
    room = rooms.get(key) if rooms and type(key) is str else None
    if room is None or not isinstance(value, Concatenation) or not value.is_even:
        return None
    first, (dtype, shape, _) = value.arrays[0], room
    return room if first.shape == shape and first.dtype.str == dtype else None


def decode(sizes: Sequence[int], memory: memoryview, elsewhere: Any = None) -> Any:
    """Return the value; its arrays are views of `memory`, and of the memory `elsewhere` in which some were placed. They keep it alive."""
    beside = []
    at = _padded(sizes[0])
    for size in sizes[1:]:
        beside.append(memory[at : at + size])
        at += _padded(size)
    is_columns, value = pickle.loads(memory[: sizes[0]], buffers=beside)
    return _columns(value, beside, elsewhere) if is_columns else value


def write(encoded: Encoded, memory: memoryview, elsewhere: memoryview | None = None) -> None:
    """Copy the buffers to where `decode` looks for them."""
    at = 0
    for buffer, size in zip(encoded.buffers, encoded.sizes, strict=True):
        if isinstance(buffer, Concatenation):
            _write_concatenation(buffer, memory[at : at + size])
        else:
            memory[at : at + size] = buffer
        at += _padded(size)
    for part, offset in encoded.placed:
        assert elsewhere is not None
        _write_concatenation(part, elsewhere[offset : offset + part.nbytes])


_PART, _PLACED = "part", "placed"
"""How a column is described in the pickle, by plain tuples, which cost a fifth of named ones:

    ("part", dtype, shape of a row, place among the buffers counted from the end, torch dtype, lengths)
    ("placed", dtype, shape of the whole, offset elsewhere, torch dtype)
    or the list of its values
"""


def _columns(value: Any, beside: Sequence[memoryview], elsewhere: Any) -> SampleColumns:
    import numpy

    keys, num_samples, layout = value
    columns: list[Any] = []
    for column in layout:
        if type(column) is list:
            columns.append(column)
            continue
        kind, dtype, shape, place, torch_dtype, *rest = column
        if torch_dtype is not None:
            importlib.import_module("torch")
        if kind == _PLACED:
            flat = numpy.frombuffer(elsewhere, dtype, math.prod(shape), place)
            columns.append(Rows([flat.reshape(shape)], torch_dtype))
            continue
        lengths = rest[0]
        rows = lengths * num_samples if isinstance(lengths, int) else sum(lengths)
        flat = numpy.frombuffer(beside[place], dtype) if len(beside[place]) else numpy.empty(0, dtype)
        columns.append(from_flat(flat.reshape(rows, *shape), num_samples, lengths, torch_dtype))
    return SampleColumns(keys, columns)


def _encoded(value: Any, parts: Sequence[Concatenation], *, is_columns: bool = False, stays_here: bool = False) -> Encoded:
    value = (is_columns, value)
    beside: list[pickle.PickleBuffer] = []
    try:
        main = _dump(pickle.Pickler, value, beside.append)
        by_value = not stays_here and _MAIN_MODULE in main  # the other process has another main module
    except (pickle.PicklingError, AttributeError, TypeError):
        by_value = True  # classes of the user's main module are known to cloudpickle only
    if by_value:
        beside.clear()
        main = _dump(cloudpickle.Pickler, value, beside.append)
    buffers: list[Any] = [main, *(buffer.raw() for buffer in beside), *parts]
    sizes = tuple(buffer.nbytes if isinstance(buffer, Concatenation) else len(buffer) for buffer in buffers)
    return Encoded(sizes, buffers, sum(_padded(size) for size in sizes))


def _write_concatenation(part: Concatenation, memory: memoryview) -> None:
    if not len(memory):
        return
    numpy = sys.modules["numpy"]
    first = part.arrays[0]
    target = numpy.frombuffer(memory, first.dtype).reshape(part.num_rows, *first.shape[1:])
    numpy.concatenate(part.arrays, out=target)


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _dump(pickler_class: Any, value: Any, buffer_callback: Callable[[pickle.PickleBuffer], object]) -> bytes:
    torch = sys.modules.get("torch")
    if torch is None and pickler_class is pickle.Pickler:
        return pickle.dumps(value, protocol=5, buffer_callback=buffer_callback)
    stream = io.BytesIO()
    pickler = pickler_class(stream, protocol=5, buffer_callback=buffer_callback)
    if torch is not None and hasattr(torch, "Tensor"):
        pickler.dispatch_table = _dispatch_table(torch)
    pickler.dump(value)
    return stream.getvalue()


def _dispatch_table(torch: Any) -> dict[type, Any]:
    global _table, _num_registered
    if _num_registered != len(copyreg.dispatch_table):  # a plain dict is looked up several times as fast as a chain of them
        _num_registered = len(copyreg.dispatch_table)
        _table = {**cloudpickle.Pickler.dispatch_table, **copyreg.dispatch_table, torch.Tensor: _reduce_tensor}
    return _table


_table: dict[type, Any] = {}
_num_registered = -1


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a plain tensor to its memory; torch's own way goes through a file format and costs 100 us."""
    if tensor.device.type != "cpu" or tensor.layout is not sys.modules["torch"].strided or tensor.is_quantized:
        return tensor.__reduce_ex__(5)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    memory = plain.reshape(-1).view(sys.modules["torch"].uint8).numpy() if plain.numel() else None
    return _rebuild_tensor, (memory, str(plain.dtype).removeprefix("torch."), tuple(plain.shape), tensor.requires_grad)


def _rebuild_tensor(memory: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    torch = importlib.import_module("torch")
    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind) if memory is None else torch.from_numpy(memory).view(kind).reshape(shape)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor
