"""`Batch`: a dict of tensors that knows where its samples came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from aioloader.engine.channel import Delivered
from aioloader.engine.output import Ready
from aioloader.protocols import Json, RecordId

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "SampleInfo"]


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
        num_samples: Samples in it; 0 for a filler.
        num_tokens: Real tokens.
        num_padding: Padding tokens.
        num_targets: Tokens that the loss counts.
        wait_s: Seconds that the trainer waited for it.
        wait_cause: What it waited for: "source", "cpu" (the workers), "order" (a slow record before others), "ranks" (others had not
            said yet whether they have it too), or "consumer": it did not wait, the batch was there.
        is_filler: True for micro-batches that only keep ranks in step (`end="pad"`): fields like those of the last micro-batch of the lane,
            with all labels ignored and everything else zero (masks one), no samples, all counts 0.
    """

    __slots__ = (
        "_base",
        "_facts",
        "_samples",
        "epoch",
        "is_filler",
        "lane",
        "num_padding",
        "num_samples",
        "num_targets",
        "num_tokens",
        "step",
        "wait_cause",
        "wait_s",
    )

    def __init__(self, fields: dict[str, Any], facts: Ready | Delivered, base: dict[str, Json]) -> None:
        super().__init__(fields)
        head = facts.head
        self.step, self.lane, self.epoch, self.num_samples, self.num_tokens, self.num_padding, self.num_targets, self.is_filler, _ = head
        self.wait_s = 0.0
        self.wait_cause = "consumer"
        self._facts = facts
        self._base = base
        self._samples: list[SampleInfo] | None = None

    @property
    def samples(self) -> list[SampleInfo]:
        """Return the provenance of each sample, in the order of the batch."""
        if self._samples is None:
            rows = self._facts.load_records()
            self._samples = [SampleInfo(shard, row, seq, sub, self.epoch) for (shard, row), seq, sub in rows]
        return self._samples

    def state(self) -> Json:
        """Return the loader's state as of this batch."""
        return {**self._base, **self._facts.state_loader()()}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return a copy of the batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return a copy of the batch in page-locked host memory, from which copies to a GPU can overlap with work."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        import torch

        fields = {name: function(value) if isinstance(value, torch.Tensor) else value for name, value in self.items()}
        return Batch(fields, self._facts, self._base)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {_shape(value)}" for name, value in self.items())
        return f"<Batch step {self.step} lane {self.lane}, {self.num_tokens} tokens; {shapes}>"


def _shape(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
