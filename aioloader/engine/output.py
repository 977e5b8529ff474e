"""Collated micro-batches as they leave the engine: arrays with counts, provenance and the state as of their delivery."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from aioloader.collate.counts import count_tokens
from aioloader.engine.assembler import Turn
from aioloader.errors import AioLoaderError, BatchError
from aioloader.protocols import Collator, Item, Json, RecordId, Sample
from aioloader.sequences import ItemRun, RowIds, Rows, columns_of, parts_of

__all__ = ["Head", "Provenance", "Ready", "TensorArray", "collate", "list_records", "make_filler", "to_arrays"]

_TENSOR_DTYPES = frozenset(
    {"bool", "complex64", "complex128", "float16", "float32", "float64"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""What torch takes from NumPy; arrays of text, objects, dates and the like stay arrays."""


_OF_WHOLE_SEQUENCES = ("global_cu_seqlens", "global_max_seqlen")
"""As `ContextParallel` delivers them."""

_COUNTED_BY_VALUE = ("attention_mask", "document_ids", "labels")

Provenance = list[tuple[Any, ...]]
"""Where samples come from, in parts: (shard, start, stop, step, seqs) where the rows are a range and all subs are 0, with the first
seq instead of all of them where none is left out; else (ids, seqs, subs). Plain data: pickling a class of our own takes ten times as
long, once per micro-batch."""


Head = tuple[int, int, int, int, int, int, int, bool, int]
"""Step, lane, epoch; samples, tokens, padding tokens, targets; whether it is a filler; what was waited for before it. A plain tuple, as
`Provenance` is plain data."""


class TensorArray:
    """A tensor as NumPy sees it, maybe still in pieces along the first axis.

    Attributes:
        pieces: Arrays of one dtype, and of one shape after the first axis.
        dtype: Torch's name, since NumPy has no bfloat16.
        shape: Of the whole.
        nbytes: Of the whole.
    """

    __slots__ = ("dtype", "nbytes", "pieces", "shape")

    def __init__(self, pieces: Sequence[npt.NDArray[Any]], dtype: str) -> None:
        first = pieces[0]
        self.pieces = pieces
        self.dtype = dtype
        self.shape: tuple[int, ...] = first.shape
        self.nbytes: int = first.nbytes
        if len(pieces) > 1:
            self.shape = (sum(map(len, pieces)), *first.shape[1:])
            self.nbytes = sum(piece.nbytes for piece in pieces)

    @property
    def array(self) -> npt.NDArray[Any]:
        """Return the tensor in one piece."""
        return self.pieces[0] if len(self.pieces) == 1 else np.concatenate(self.pieces)

    def write(self, target: npt.NDArray[Any]) -> None:
        """Copy it to an array of its shape."""
        if len(self.pieces) == 1:
            np.copyto(target, self.pieces[0])
        else:
            np.concatenate(self.pieces, out=target)


@dataclass(slots=True)
class Ready:
    """A collated micro-batch.

    Attributes:
        fields: One `TensorArray` per array or tensor that the collator returned; other values as they are.
        provenance: Where each sample comes from.
        state: What of the rank's state is new once this micro-batch is delivered.
        num_records: In-flight slots that come free with its delivery.
        num_samples: Samples that the collator got.
        cause: What the engine was waiting for before it, an index into `telemetry.waits.CAUSES`; its own work, where nothing runs beside
            the trainer.
        is_filler: It only keeps lanes in step and has no fields; the bridge makes them up.
    """

    fields: dict[str, Any]
    step: int
    lane: int
    epoch: int
    num_tokens: int
    num_padding: int
    num_targets: int
    provenance: Provenance
    state: Json
    num_records: int
    num_samples: int
    cause: int = 1
    is_filler: bool = False

    @property
    def head(self) -> Head:
        """Return what a batch says of itself, as one value: it crosses to the trainer with every micro-batch."""
        return (
            self.step,
            self.lane,
            self.epoch,
            self.num_samples,
            self.num_tokens,
            self.num_padding,
            self.num_targets,
            self.is_filler,
            self.cause,
        )

    def load_records(self) -> list[tuple[RecordId, int, int]]:
        """Return ((shard, row), seq, sub) of each sample."""
        return list_records(self.provenance)

    def state_loader(self) -> Callable[[], Json]:
        """Return a function that returns what of the rank's state is new, and keeps nothing else alive."""
        state = self.state
        return lambda: state


def list_records(provenance: Provenance) -> list[tuple[RecordId, int, int]]:
    """Return ((shard, row), seq, sub) of each sample."""
    rows: list[tuple[RecordId, int, int]] = []
    for part in provenance:
        if isinstance(part[0], str):
            shard, start, stop, step, seqs = part
            ids = RowIds(shard, range(start, stop, step))
            seqs = range(seqs, seqs + len(ids)) if isinstance(seqs, int) else seqs
            rows.extend(zip(ids, seqs, repeat(0, len(ids)), strict=True))
        else:
            rows.extend(zip(*part, strict=True))
    return rows


def collate(turn: Turn, collator: Collator, state_after: Callable[[Turn, int], Json]) -> Ready:
    """Run the collator on one micro-batch; `state_after` makes the state of it and its number of real tokens.

    Raises:
        BatchError: The collator failed, or returned something else than a mapping.
    """
    batch = turn.batch
    if batch.is_filler:
        return make_filler(batch.step, batch.lane, batch.epoch, state_after(turn, 0))
    items = batch.group.items
    try:
        fields = _collated(collator, batch.group.samples)
        if not isinstance(fields, Mapping):
            raise TypeError(f"collate: expected a dict of arrays or tensors, got {type(fields).__name__}; return one array per field.")
        counts = count_tokens(_countable(fields))
        arrays = to_arrays(fields)
    except (AioLoaderError, KeyboardInterrupt):  # Ctrl-C, with workers=0
        raise
    except BaseException as error:
        first = items[0] if items else None
        raise BatchError(
            f"the collator failed on micro-batch {batch.step} of lane {batch.lane} ({len(items)} samples): {type(error).__name__}: {error}",
            seq=first.seq if first else None,
            record=first.record if first else None,
            lane=batch.lane,
        ) from error
    if "filler" in batch.state:
        batch.state["filler"] = _outline(arrays)
    return Ready(
        fields=arrays,
        step=batch.step,
        lane=batch.lane,
        epoch=batch.epoch,
        num_tokens=counts.num_tokens,
        num_padding=counts.num_padding,
        num_targets=counts.num_targets,
        provenance=_provenance(items),
        state=state_after(turn, counts.num_tokens),
        num_records=batch.num_records,
        num_samples=len(batch.group.samples),
    )


def make_filler(step: int, lane: int, epoch: int, state: Json) -> Ready:
    """Return a micro-batch without samples and fields."""
    counts = dict.fromkeys(("num_tokens", "num_padding", "num_targets", "num_records", "num_samples"), 0)
    return Ready(fields={}, step=step, lane=lane, epoch=epoch, provenance=[], state=state, is_filler=True, **counts)


def _outline(fields: Mapping[str, Any]) -> list[list[Any]]:
    """Return (name, dtype, shape) of each field, as it goes into a state; dtype and shape are None where it is no tensor.

    Of the lengths of whole sequences, of which the micro-batch is a part, also the largest: it cannot be told from the part.
    """
    return [_outline_of(name, field) for name, field in fields.items()]


def _outline_of(name: str, field: Any) -> list[Any]:
    if not isinstance(field, TensorArray):
        return [name, None, None]
    largest = [int(field.array.max())] if name in _OF_WHOLE_SEQUENCES and field.nbytes else []
    return [name, field.dtype, list(field.shape), *largest]


def _countable(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with those that are counted by value in one piece."""
    in_rows = [name for name in _COUNTED_BY_VALUE if type(fields.get(name)) is Rows]
    return {**fields, **{name: fields[name].whole() for name in in_rows}} if in_rows else fields


def _collated(collator: Collator, samples: Sequence[Sample]) -> Any:
    collate_columns = getattr(collator, "collate_columns", None)
    if collate_columns is not None and (columns := columns_of(samples)) is not None:
        fields = collate_columns(columns)
        if fields is not None:
            return fields
    return collator(list(samples))


def _provenance(items: Sequence[Item]) -> Provenance:
    found: Provenance = []
    for part in parts_of(items):
        if isinstance(part, ItemRun):
            found.extend(_run_provenance(part))
        else:
            found.append(([item.record for item in part], [item.seq for item in part], [item.sub for item in part]))
    return found


def _run_provenance(run: ItemRun) -> Provenance:
    seqs, records = run.seqs, run.records
    if isinstance(records, RowIds) and type(seqs) is range and seqs.step == 1:
        rows = records.rows
        return [(records.shard, rows.start, rows.stop, rows.step, seqs.start)]
    seqs = list(seqs)
    if isinstance(records, RowIds):
        rows = records.rows
        return [(records.shard, rows.start, rows.stop, rows.step, seqs)]
    return [(list(records), seqs, [0] * len(seqs))]


def to_arrays(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with arrays and tensors as `TensorArray`, sharing their memory."""
    return {name: _to_array(value) for name, value in fields.items()}


def _to_array(value: Any) -> Any:
    if isinstance(value, Rows):
        return _rows_to_array(value)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        name = _tensor_dtype(array.dtype)
        return value if name is None else TensorArray([array], name)
    if type(value).__module__.startswith("torch") and hasattr(value, "detach"):
        return _tensor_to_array(value)
    return value


def _rows_to_array(rows: Rows) -> Any:
    """Return the rows in their pieces, whose memory may belong to a worker: a consumer copies them."""
    if rows.torch_dtype is not None:
        return TensorArray(rows.pieces, rows.torch_dtype)
    dtype = rows.pieces[0].dtype
    name = _tensor_dtype(dtype)
    return TensorArray(rows.pieces, name) if name is not None and dtype.isnative else _to_array(rows.joined().copy())


@functools.cache
def _tensor_dtype(dtype: np.dtype[Any]) -> str | None:
    """Return torch's name of a NumPy dtype, None if it has none."""
    return dtype.name if dtype.name in _TENSOR_DTYPES else None


def _tensor_to_array(tensor: Any) -> TensorArray:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    name = str(plain.dtype).removeprefix("torch.")
    try:
        return TensorArray([plain.numpy()], name)
    except TypeError:  # bfloat16 and the 8-bit floats: carry the bits
        import torch

        bits = {1: torch.uint8, 2: torch.int16}[plain.element_size()]
        return TensorArray([plain.view(bits).numpy()], name)
