"""Micro-batches that only carry samples to the trainer: whatever is done together travels together, nothing is held back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aioloader.batching.counters import zero_counters
from aioloader.protocols import Group, Item, Json, Ref
from aioloader.sequences import samples_of

__all__ = ["AsDone", "hand_over", "take_over"]

_SAMPLES = "samples"
_APART_BYTES = 1 << 15  # above this, shared memory is cheaper than a copy into and out of a message


def hand_over(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the samples in one field, with their large arrays and tensors in fields of their own, which go through shared memory."""
    fields: dict[str, Any] = {}
    return {_SAMPLES: [_packed(sample, fields) for sample in samples], **fields}


def take_over(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the samples that `hand_over` got, from fields whose arrays have become tensors."""
    samples: list[dict[str, Any]] = []
    for sample, apart in fields[_SAMPLES]:
        for name, (field, is_array) in apart:
            sample[name] = fields[field].numpy() if is_array else fields[field]
        samples.append(sample)
    return samples


def _packed(sample: dict[str, Any], fields: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, tuple[str, bool]]]]:
    """Return a sample without its large arrays, which are added to `fields`, and which of its names they are."""
    apart: list[tuple[str, tuple[str, bool]]] = []
    for name, value in sample.items():
        if getattr(value, "nbytes", 0) > _APART_BYTES and _is_plain(value):
            field = str(len(fields))
            fields[field] = value
            apart.append((name, (field, isinstance(value, np.ndarray))))
    if apart:
        sample = {**sample, **dict.fromkeys(name for name, _ in apart)}
    return sample, apart


def _is_plain(value: Any) -> bool:
    """Return whether a value is an array or tensor that comes back as what it is."""
    if type(value) is np.ndarray:
        return value.dtype.kind in "biufc" and value.dtype.isnative and value.dtype.itemsize <= 16
    kind = type(value)
    return (
        kind.__module__ == "torch" and kind.__name__ == "Tensor" and not value.requires_grad and value.layout is not None and value.is_cpu
    )


@dataclass(frozen=True, slots=True)
class AsDone:
    """Groups what arrives together: the samples of one chunk of work, at most `max_samples`, and never waits for more.

    How work is cut into chunks follows its cost, so the borders of the groups depend on timing; the samples, one after another, do
    not. For consumers that take groups apart again.
    """

    max_samples: int

    def start(self) -> _AsDoneBatcher:
        """Return a fresh batcher for one lane."""
        return _AsDoneBatcher(self.max_samples)

    def fingerprint(self) -> dict[str, Json]:
        """Return the kind alone: the limit changes no sample."""
        return {"kind": "AsDone"}


class _AsDoneBatcher:
    """Holds nothing between two calls."""

    __slots__ = ("_max_samples",)

    def __init__(self, max_samples: int) -> None:
        self._max_samples = max_samples

    def push(self, item: Item) -> Iterator[Group]:
        yield Group([item.sample], [item])

    def push_run(self, items: Sequence[Item]) -> Iterator[tuple[Group, int]]:
        for first in range(0, len(items), self._max_samples):
            part = items[first : first + self._max_samples]
            yield Group(samples_of(part), part), first + len(part)

    def ready(self) -> Iterator[Group]:
        return iter(())

    def finish(self) -> Iterator[Group]:
        return iter(())

    def counters(self) -> dict[str, int]:
        return zero_counters()

    def state(self) -> Json:
        return {}

    def refs(self, state: Json) -> Iterable[Ref]:
        return ()

    def restore(self, state: Json, items: Mapping[Ref, Item]) -> None:
        """Do nothing: nothing was held."""
