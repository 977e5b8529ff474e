"""Copies batches to the GPU ahead of the training step, on a stream of their own.

loader      b2            b3            b4
copies          [b2 ->]       [b3 ->]       [b4 ->]        stream for copies, from page-locked memory
training    [ step on b0 ][ step on b1 ][ step on b2 ]     the caller's stream, which waits for the copy of its batch only
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from aioloader.errors import ConfigError

__all__ = ["DevicePrefetcher"]

_DEPTH = 2

_AT_ONCE = 2
"""Batches taken for each that is yielded, at most: the first one waits for one more only, not for as many as `depth`."""


class _Copy(Protocol):
    """A batch on its way to the device."""

    def arrive(self) -> Any:
        """Return the batch on the device, good for work on the caller's current stream."""


class DevicePrefetcher(Iterator[Any]):
    """Yields the batches of `batches` in their order on `device`, with up to `depth` more on their way.

    What it yields is `batch.to(device)`, which knows what the batch knew: `loader.state_dict(after=batch)` is the state as of the
    batch in hand, however many were taken out of the loader ahead. A failure keeps its place: the batches before it come first.

    Args:
        batches: A loader or an iterator. Batches have `to(device)`; for CUDA `to(device, non_blocking=True)` and `pin_memory()`.
        device: Where to. On the CPU nothing is copied.
        depth: Batches to take ahead; default: 2 for CUDA, where that many more of them take memory, and 0 for the CPU.

    Raises:
        ConfigError: `depth` is negative.
    """

    def __init__(self, batches: Iterable[Any], device: str | torch.device, *, depth: int | None = None) -> None:
        self._device = torch.device(device)
        if depth is not None and depth < 0:
            raise ConfigError("DevicePrefetcher(depth=)", expected="0 or more", got=depth, do="leave it out for 2")
        is_cuda = self._device.type == "cuda"
        self._depth = depth if depth is not None else _DEPTH if is_cuda else 0
        self._copier = _CudaCopier(self._device) if is_cuda else None
        self._batches: Iterator[Any] | None = iter(batches)
        self._under_way: deque[_Copy] = deque()
        self._failure: Exception | None = None

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            Exception: What the loader raised in its place.
        """
        for _ in range(_AT_ONCE):
            if self._batches is not None and len(self._under_way) <= self._depth:
                self._take_one()
        if self._under_way:
            return self._under_way.popleft().arrive()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        raise StopIteration

    @property
    def num_ahead(self) -> int:
        """Return the number of batches that were taken out of the loader and not yielded yet."""
        return len(self._under_way)

    def close(self) -> None:
        """Drop the batches under way and leave the loader's iterator; safe to call twice."""
        self._under_way.clear()
        self._failure = None
        batches, self._batches = self._batches, None
        close = getattr(batches, "close", None)
        if close is not None:
            close()

    def _take_one(self) -> None:
        assert self._batches is not None
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
        except Exception as error:  # noqa: BLE001 - raised after the batches before it
            self._batches, self._failure = None, error
        else:
            self._under_way.append(_HostCopy(batch, self._device) if self._copier is None else self._copier.start(batch))


class _HostCopy:
    """Nothing to wait for."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._batch = batch.to(device)

    def arrive(self) -> Any:
        return self._batch


class _CudaCopier:
    """Starts copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The loader may reuse the memory of a batch that nobody holds, and the host runs ahead of the copies.
        self._sources: deque[tuple[torch.cuda.Event, Any]] = deque()

    def start(self, batch: Any) -> _CudaCopy:
        while self._sources and self._sources[0][0].query():  # type: ignore[no-untyped-call]
            self._sources.popleft()
        is_pinned = all(value.is_pinned() for value in batch.values() if isinstance(value, Tensor))
        source = batch if is_pinned else batch.pin_memory()
        with torch.cuda.stream(self._stream):
            moved = source.to(self._device, non_blocking=True)
            copied = self._stream.record_event()
        self._sources.append((copied, source))
        return _CudaCopy(moved, copied, self._device)


class _CudaCopy:
    """A batch whose memory on the device is filled by one stream and used by another."""

    def __init__(self, batch: Any, copied: torch.cuda.Event, device: torch.device) -> None:
        self._batch = batch
        self._copied = copied
        self._device = device

    def arrive(self) -> Any:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied)
        for value in self._batch.values():
            if isinstance(value, Tensor):
                value.record_stream(stream)  # else its memory could be handed to the next copy while the step still reads it
        return self._batch
