"""What the contract tests share: functions that travel to workers, hosts and pools to run on, and what a run delivered as data.

Light on purpose: the engine's processes import it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from aioloader.errors import AioLoaderError
from aioloader.pools.rng import record_rng
from aioloader.state.fingerprint import function_fingerprint
from tests.naming import stable_repr

BAD = 15
"""The record at which `bad_at_15` fails."""

ROOT = Path(__file__).resolve().parents[2]

Options = dict[str, Any]

INLINE: Options = {"workers": 0}
THREADS: Options = {"host": "thread", "pool": "thread", "workers": 2}
PROCESSES: Options = {"host": "process", "pool": "process", "workers": 2}
THREAD_HOST: Options = {"host": "thread", "pool": "process", "workers": 2}
SIDECAR_THREADS: Options = {"host": "process", "pool": "thread", "workers": 2}

EVERY_HOST: dict[str, Options] = {
    "inline": INLINE,
    "threads": THREADS,
    "processes": PROCESSES,
    "thread-host": THREAD_HOST,
    "sidecar-threads": SIDECAR_THREADS,
}


def name_of(options: Options) -> str:
    """Return a readable test id."""
    if options == INLINE:
        return "inline"
    return "-".join(value if isinstance(value, str) else stable_repr(value) for value in options.values())


def collate(samples: list[Any]) -> dict[str, Any]:
    return {"x": np.array(samples)}


def documents(num_records: int) -> list[dict[str, Any]]:
    """Return records with token lists of 1 to 13 tokens."""
    return [{"number": number, "tokens": list(range(number, number + 1 + number * 7 % 13))} for number in range(num_records)]


def some_or_many(record: dict[str, Any]) -> Any:
    """Filter some records, make two or three samples of others."""
    number, tokens = record["number"], np.array(record["tokens"])
    if number % 7 == 3:
        return None
    if number % 5 == 1:
        return [{"input_ids": tokens + part} for part in range(2 + number % 2)]
    return {"input_ids": tokens}


class SomeOrManySlowly:
    """The same after 0 to 2 ms, different in every run; to a loader it is the same function."""

    def __call__(self, record: dict[str, Any]) -> Any:
        time.sleep(os.urandom(1)[0] / 255 * 0.002)
        return some_or_many(record)

    def fingerprint(self) -> Any:
        return function_fingerprint(some_or_many)


def facts(batch: Any) -> tuple[Any, ...]:
    """Return all that a batch says, comparable: tensors bit by bit, provenance, counts and state.

    The state is taken without the place where the source is to be read from: how far back the last read began depends on the
    timing, and resuming from it gives the same.
    """
    fields = tuple((name, str(value.dtype), tuple(value.shape), value.numpy().tobytes()) for name, value in batch.items())
    counts = (batch.step, batch.lane, batch.epoch, batch.num_tokens, batch.num_padding, batch.num_targets)
    return counts, tuple(batch.samples), fields, without_source(batch.state())


def without_source(state: Any) -> str:
    return json.dumps({name: value for name, value in state.items() if name != "source"}, sort_keys=True)


def all_facts(batches: Iterable[Any]) -> list[tuple[Any, ...]]:
    return [facts(batch) for batch in batches]


def numbers(batches: Iterable[Any]) -> list[int]:
    """Return the values of field `x` of all batches, one after another."""
    return [number for batch in batches for number in batch["x"].flatten().tolist()]


def drain(loader: Any, delay_s: float = 0.0, of: Callable[[Any], list[int]] | None = None) -> tuple[list[int], AioLoaderError | None]:
    """Return the numbers delivered (what `of` makes of each batch), and the error that ended the loop."""
    delivered: list[int] = []
    try:
        for batch in loader:
            delivered += numbers([batch]) if of is None else of(batch)
            time.sleep(delay_s)
    except AioLoaderError as error:
        return delivered, error
    return delivered, None


def run_script(source: str, *arguments: str, timeout_s: float = 30, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python program as the main module of a fresh interpreter, from the root of the repository."""
    command = [sys.executable, "-c", textwrap.dedent(source), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, cwd=ROOT, **options)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_dead(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Return which processes are still alive once none is or `timeout_s` have passed."""
    deadline = time.monotonic() + timeout_s
    left = list(pids)
    while (left := [pid for pid in left if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def as_list(samples: list[Any]) -> dict[str, Any]:
    return {"samples": samples}


def bad_at_15(number: int) -> int:
    if number == BAD:
        raise ValueError(f"record {number} is bad")
    return number


class Numbers:
    """An asynchronous upstream."""

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(30):
            await asyncio.sleep(0.001)
            yield number


def draw(number: int) -> dict[str, Any]:
    """Draw from all generators but torch's."""
    return {
        "number": number,
        "random": random.random(),
        "gauss": random.gauss(0, 1),
        "shuffle": random.sample(range(100), 3),
        "numpy": int(np.random.randint(0, 2**31)),
        "normal": np.random.normal(size=2).tolist(),
        "own": int(record_rng().integers(2**31)),
    }


def draw_torch(number: int) -> Any:
    """Draw from torch's generator, imported by the first record."""
    import torch

    return tuple(torch.rand(2).tolist())


def draw_numpy(number: int) -> dict[str, Any]:
    return {"number": number, "numpy": int(np.random.randint(0, 2**31))}


def large(number: int) -> Any:
    return np.full((512, 512), number, np.float32)


def stack(samples: list[Any]) -> dict[str, Any]:
    return {"image": np.stack(samples), "small": np.arange(len(samples))}


class ReusedBuffer:
    """A collator that saves allocations."""

    def __init__(self) -> None:
        self.buffer = np.zeros((2, 10_000), np.int32)

    def __call__(self, samples: list[int]) -> dict[str, Any]:
        self.buffer[:] = np.array(samples)[:, None]
        return {"x": self.buffer, "first": self.buffer[:, 0], "strided": self.buffer[:, ::5000]}


def zoo(number: int) -> dict[str, Any]:
    """One of everything."""
    import torch

    generator = torch.Generator().manual_seed(number)
    base = np.arange(48, dtype=np.int16).reshape(6, 8) + number
    return {
        "bfloat16": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "float16": torch.randn(4, generator=generator).to(torch.float16),
        "bool": torch.tensor([True, False, number % 2 == 0]),
        "scalar": torch.tensor(number * 1.5),
        "empty": torch.empty(0, 7),
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "complex": torch.tensor([1 + 2j, number]),
        "ragged": torch.arange(number + 1),
        "needs_grad": torch.ones(2, requires_grad=True),
        "np_bool": np.array([number % 3 == 0, True]),
        "np_scalar": np.float32(number),
        "np_zero_d": np.array(number, dtype=np.uint16),
        "np_empty": np.empty((0, 3), np.float64),
        "np_strided": base[::2, ::-3],
        "np_fortran": np.asfortranarray(base),
        "np_big_endian": np.array([number, 2], dtype=">i4"),
        "np_text": np.array(["a", "bcd" * number]),
        "np_objects": np.array([None, "x", number], dtype=object),
        "np_dates": np.array(["2020-01-01", "2021-02-03"], dtype="datetime64[D]"),
        "np_records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "read_only": np.frombuffer(bytes(range(8)), np.uint8),
        "text": f"text {number} \N{GREEK SMALL LETTER ALPHA}",
        "bytes": bytes(range(number)),
        "number": number,
        "huge": 10**40 + number,
        "none": None,
        "nested": {"a": {"b": [np.arange(3), {"c": torch.zeros(2)}]}, 7: (number, [number])},
        "set": {1, 2, number},
    }


# Large samples of one shape; here, since importing torch, as the tests do, takes workers seconds


def photo(number: int) -> Any:
    return {"image": np.full((3, 300, 300), number, np.int32), "mask": np.full((200, 100), number), "label": number}


def photo_of_another_shape(number: int) -> Any:
    return photo(number) if number != 13 else {**photo(number), "image": np.full((300, 3, 300), number, np.int32)}


def some_photos(number: int) -> Any:
    return photo(number) if number % 7 else None


def photo_or_two(number: int) -> Any:
    return photo(number) if number % 11 else [photo(number), photo(-number)]


def photo_then_trouble(number: int) -> Any:
    """The third record of a batch fails while the fourth is still being written."""
    if number == 42:
        raise ValueError("bad")
    if number == 43:
        time.sleep(0.3)
    return {**photo(number), "tail": np.full(3000, number)}
