"""What every contestant is given: records by index, the function that makes a sample of one, and how samples become a batch.

The classes that do this live in modules of their own that import no torch, so that workers which need none do not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "MakeBatch", "Records", "Sample", "Stacked", "Work", "in_batches", "stack", "to_tensors"]

Array = npt.NDArray[Any]
Sample = Mapping[str, Array]


class Work(Protocol):
    """One workload's data and function; picklable, and a pure function of the index.

    Attributes:
        num_records: Records of one pass; a multiple of `batch_size`.
        batch_size: Samples per batch.
        window: Records in flight that every contestant is allowed, so that none wins by reading further ahead.
        is_large: Whether a batch is so large that it pays to move it as a tensor in shared memory.
    """

    @property
    def num_records(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def window(self) -> int: ...

    @property
    def is_large(self) -> bool: ...

    def record(self, index: int) -> Any:
        """Return a record, as a source reads it."""

    def sample(self, record: Any) -> Sample:
        """Return the sample made of a record: the work."""

    def collate(self, samples: Sequence[Sample]) -> dict[str, Array]:
        """Return the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """Work whose batches are the samples stacked by field: a contestant may use its own way of doing that."""

    num_records: int
    batch_size: int
    window: int = 2048
    is_large: bool = False

    def record(self, index: int) -> Any:
        return index

    def collate(self, samples: Sequence[Sample]) -> dict[str, Array]:
        return stack(samples)


@dataclass(frozen=True, slots=True)
class Records:
    """The records of `work` as a sequence."""

    work: Work

    def __len__(self) -> int:
        return self.work.num_records

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.work.num_records:
            raise IndexError(index)
        return self.work.record(index)


@dataclass(frozen=True, slots=True)
class MakeBatch:
    """Makes a whole batch of a list of indices, for contestants that give a worker one batch at a time."""

    work: Work
    as_tensors: bool

    def __call__(self, indices: Sequence[int]) -> dict[str, Any]:
        work = self.work
        batch = work.collate([work.sample(work.record(index)) for index in indices])
        return to_tensors(batch) if self.as_tensors else batch


def in_batches(work: Work) -> list[list[int]]:
    """Return the indices of each batch, in order."""
    return [list(range(first, first + work.batch_size)) for first in range(0, work.num_records, work.batch_size)]


def stack(samples: Sequence[Sample]) -> dict[str, Array]:
    """Return samples of equal shapes, stacked by field."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def to_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with its arrays as tensors over the same memory."""
    import torch

    from_numpy: Callable[[Any], torch.Tensor] = torch.from_numpy
    return {name: value if isinstance(value, torch.Tensor) else from_numpy(value) for name, value in batch.items()}
