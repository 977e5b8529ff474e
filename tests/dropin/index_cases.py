"""Datasets and collators that travel to workers; light on purpose, a worker that imports torch takes seconds."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np


class Numbers:
    """Item i is {"i": i}."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"i": index}


class Noisy(Numbers):
    """Draws from the global generator, as augmentation does."""

    def __getitem__(self, index: int) -> Any:
        return {"i": index, "noise": random.random()}


class Logged(Numbers):
    """Writes one byte for each item that is fetched, and changes itself."""

    def __init__(self, size: int, path: str) -> None:
        super().__init__(size)
        self.path = path
        self.num_fetched = 0

    def __getitem__(self, index: int) -> Any:
        self.num_fetched += 1
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, b".")
        os.close(descriptor)
        return {"i": index}


class WithEpoch(Numbers):
    """Says which epoch it was told of."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return {"i": index, "epoch": self.epoch}


class InLists(Numbers):
    """Has torch's protocol for many items at once, and says how many were asked for."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"i": index, "together": len(indices)} for index in indices]


class Odd(Numbers):
    """Its items are None and lists."""

    def __getitem__(self, index: int) -> Any:
        return None if index % 2 else [index, index]


class Shuffled:
    """A sampler with an epoch, that counts how often it was told."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class Lists(Shuffled):
    """A batch sampler: lists of 1, 2 and 3 of them."""

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Any:
        order = list(super().__iter__())
        at, size = 0, 1
        while at < len(order):
            yield order[at : at + size]
            at, size = at + size, size % 3 + 1


class WithState(Shuffled):
    """Resumes by its own state."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = 0
        self.is_loaded = False

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at, self.is_loaded = state["at"], True

    def __iter__(self) -> Any:
        if not self.is_loaded:
            self.at = 0
        self.is_loaded = False
        for index in list(super().__iter__())[self.at :]:
            self.at += 1
            yield index


def stack(samples: list[Any]) -> dict[str, Any]:
    return {name: np.array([sample[name] for sample in samples]) for name in samples[0]}


def as_objects(samples: list[Any]) -> dict[str, Any]:
    return {"samples": samples}


def odd_twice(record: dict[str, Any]) -> Any:
    """Leave out multiples of 3, double odd ones."""
    if record["i"] % 3 == 0:
        return None
    return [record, record] if record["i"] % 2 else record
