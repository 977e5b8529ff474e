"""`Batch`: a dict of tensors that knows where its samples came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from aioloader.engine.channel import Delivered
from aioloader.engine.output import Ready, TensorArray
from aioloader.protocols import Json, RecordId

__all__ = ["Batch", "SampleInfo", "to_batch"]


class SampleInfo(NamedTuple):
    """The provenance of one sample: `row` of `shard`, the `sub`-th sample made of record `seq` of a lane, in `epoch`."""

    shard: str
    row: int
    seq: int
    sub: int
    epoch: int

    @property
    def record(self) -> RecordId:
        """Return (shard, row): the id of the record that the sample was made of."""
        return (self.shard, self.row)


class Batch(dict[str, Any]):
    """One micro-batch.

    A dict from field name to tensor, on the CPU until `to`. The tensors may view shared memory that the loader reuses once
    they and all their views are gone; keeping them is safe.

    Attributes:
        step: The optimizer step it belongs to, counted over the whole run from 0.
        lane: The logical data-parallel stream it comes from.
        epoch: The epoch of its last sample.
        num_tokens: Real tokens.
        num_padding: Padding tokens.
        num_targets: Tokens that the loss counts.
        is_filler: True for padding micro-batches that only keep ranks even; they carry no loss.
    """

    def __init__(self, fields: dict[str, Any], facts: Ready | Delivered, records: Callable[[], Any], state: Callable[[], Json]) -> None:
        super().__init__(fields)
        self.step = facts.step
        self.lane = facts.lane
        self.epoch = facts.epoch
        self.num_tokens = facts.num_tokens
        self.num_padding = facts.num_padding
        self.num_targets = facts.num_targets
        self.is_filler = False
        self._facts = facts
        self._records = records
        self._state = state
        self._samples: list[SampleInfo] | None = None

    @property
    def samples(self) -> list[SampleInfo]:
        """Return the provenance of each sample, in the order of the batch."""
        if self._samples is None:
            rows: Iterable[tuple[RecordId, int, int]] = self._records()
            self._samples = [SampleInfo(shard, row, seq, sub, self.epoch) for (shard, row), seq, sub in rows]
        return self._samples

    def state(self) -> Json:
        """Return the loader's state as of this batch."""
        return self._state()

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return a copy of the batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return a copy of the batch in page-locked host memory, from which copies to a GPU can overlap with work."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        fields = {name: function(value) if isinstance(value, torch.Tensor) else value for name, value in self.items()}
        return Batch(fields, self._facts, self._records, self._state)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {_shape(value)}" for name, value in self.items())
        return f"<Batch step {self.step} lane {self.lane}, {self.num_tokens} tokens; {shapes}>"


def to_batch(facts: Ready | Delivered) -> Batch:
    """Return the batch with its arrays as tensors, over the same memory where that is the batch's own."""
    is_shared = isinstance(facts, Ready)  # made in this very process: the memory may belong to the collator or to a record
    fields = {name: _tensor(value, copy=is_shared) if isinstance(value, TensorArray) else value for name, value in facts.fields.items()}
    if isinstance(facts, Delivered):
        return Batch(fields, facts, facts.records, facts.state)
    return Batch(fields, facts, lambda: facts.records, lambda: facts.state)


def _tensor(field: TensorArray, *, copy: bool) -> torch.Tensor:
    array = field.array.copy() if copy or not field.array.flags.writeable else field.array
    kind = getattr(torch, "bool" if field.dtype == "bool" else field.dtype)
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == kind else tensor.view(kind)


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
