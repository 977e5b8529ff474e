"""What the tests of the drop-in datasets share: functions that travel to workers, so nothing heavy is imported here."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Columns = dict[str, list[Any]]

INLINE: dict[str, Any] = {"num_workers": 0}
THREADS: dict[str, Any] = {"num_workers": 2, "pool": "thread", "host": "thread"}
PROCESSES: dict[str, Any] = {"num_workers": 2}


class Failure(BaseException):
    """What a panic in a native library looks like: no `Exception`."""


def records(number: int) -> list[dict[str, int]]:
    return [{"i": index} for index in range(number)]


def same(batch: Columns) -> Columns:
    return batch


def numbered(batch: Columns) -> Columns:
    return {"x": list(batch["i"]), "length": [len(batch["i"])]}


def first_slowest(batch: Columns) -> Columns:
    time.sleep(0.02 / (1 + batch["i"][0]))
    return {"x": batch["i"]}


def at_random_times(batch: Columns) -> Columns:
    time.sleep(os.urandom(1)[0] / 255 * 0.003)
    return {"x": batch["i"]}


def some_or_many(batch: Columns) -> Columns | None:
    """Leave out every fifth record, in all the ways there are; make three samples of every seventh; draw a random number for each."""
    number: int = batch["i"][0]
    if number % 5 == 2:
        nothing: tuple[Columns | None, ...] = (None, {}, {"x": []})
        return nothing[number % 3]
    times = 3 if number % 7 == 1 else 1
    return {"x": [number + part / 10 for part in range(times)], "drawn": [random.random() for _ in range(times)]}


def bad_at_15(batch: Columns) -> Columns:
    if batch["i"][0] == 15:
        raise ValueError("the fifteenth is corrupt")
    return {"x": batch["i"]}


def panics_at_3(batch: Columns) -> Columns:
    if batch["i"][0] == 3:
        raise Failure("panicked")
    return {"x": batch["i"]}


def head_of_line(batch: Columns) -> Columns:
    if batch["i"][0] == 0:
        time.sleep(0.15)
    return {"x": batch["i"]}


def xs(samples: Iterable[dict[str, Any]]) -> list[Any]:
    return [sample["x"] for sample in samples]


def ids(rows: Iterable[dict[str, Any]]) -> list[int]:
    return [row["i"] for row in rows]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def split_at(dataset: Any, number: int) -> tuple[list[Any], Any]:
    """Return the first items, and the state after them as a file would give it back."""
    iterator = iter(dataset)
    first = list(itertools.islice(iterator, number))
    return first, through_json(dataset.state_dict())


def rest_of(dataset: Any, state: Any) -> list[Any]:
    dataset.load_state_dict(state)
    return list(dataset)


class Counting:
    """An iterable that counts what was taken of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.taken = 0
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[dict[str, int]]:
        for index in range(self.number):
            self.taken += 1
            yield {"i": index}

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def failing_after(number: int) -> Callable[[], Iterator[dict[str, int]]]:
    def stream() -> Iterator[dict[str, int]]:
        yield from records(number)
        raise OSError("the disk is gone")

    return stream


def pretend_worker(monkeypatch: Any, index: int, count: int) -> None:
    """Let this process pass for worker `index` of a DataLoader."""
    from torch.utils.data._utils import worker

    facts: Any = worker.WorkerInfo(id=index, num_workers=count, seed=0, dataset=[])  # type: ignore[arg-type]
    monkeypatch.setattr(worker, "_worker_info", facts)


def batched(samples: list[dict[str, Any]]) -> list[Any]:
    """A collator for DataLoaders around: the numbers of the samples."""
    return [next(iter(sample.values())) for sample in samples]


def unbatched(sample: dict[str, Any]) -> list[Any]:
    return batched([sample])


def collate_for(batch_size: int | None) -> Callable[[Any], list[Any]]:
    return unbatched if batch_size is None else batched
