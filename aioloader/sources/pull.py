"""Takes spans of records out of an iterator: many at a time, early when the upstream is slow, and failures in their place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

import anyio
from anyio.lowlevel import checkpoint

from aioloader.errors import AioLoaderError, SourceError
from aioloader.protocols import Record, RecordId

__all__ = ["PATIENCE_S", "Pace", "Pulled", "located", "pull", "pull_async", "source_error"]

PATIENCE_S = 0.010
"""How long records that are already there wait for more; next to it, the cost of handing over a span does not count."""
_GROWTH = 4


class Pace:
    """How many records to ask for at once.

    A pull that has to wait for its next record holds back the ones before. So few are asked for until the upstream has shown
    that it has them ready, and again few once it had not.
    """

    def __init__(self) -> None:
        self._size = 1
        self._started = 0.0

    def start(self, max_records: int, now: float) -> int:
        """Return how many records to ask for at most in a pull that starts now."""
        self._started = now
        return min(max_records, self._size)

    def finish(self, num_records: int, now: float) -> None:
        """Learn from the pull that just ended."""
        if now - self._started >= PATIENCE_S:
            self._size = 1
        elif num_records >= self._size:
            self._size *= _GROWTH


class Pulled(NamedTuple):
    """What one pull gave: the records, then what stopped it, if anything did.

    Attributes:
        records: The records, in order.
        failure: What the upstream raised after `records`.
        ended: The upstream has no more.
    """

    records: list[Record]
    failure: BaseException | None = None
    ended: bool = False


def pull(
    iterator: Iterator[Record], max_records: int, *, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
) -> Pulled:
    """Return the next records of `iterator`: `max_records`, or fewer once `patience_s` seconds have passed.

    The first record is waited for however long it takes. A failure is returned, not raised, so that the records before it are not lost.

    Raises:
        KeyboardInterrupt: At once, since a request to stop must not wait; the iterator can not be read on.
    """
    records: list[Record] = []
    deadline = clock() + patience_s
    try:
        for record in islice(iterator, max_records):
            records.append(record)
            if clock() >= deadline:
                return Pulled(records)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001 - settled by the caller, after the records before it
        return Pulled(records, failure=failure)
    return Pulled(records, ended=len(records) < max_records)


async def pull_async(
    iterator: AsyncIterator[Record], max_records: int, *, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
) -> Pulled:
    """Return the next records of `iterator`, as `pull` does. No record is ever asked for and then not waited for.

    A cancellation is passed on into the iterator, which ends it, and out to the caller. A cancellation error that nobody
    asked for is the upstream's own failure.
    """
    await checkpoint()
    records: list[Record] = []
    deadline = clock() + patience_s
    try:
        while len(records) < max_records:
            records.append(await anext(iterator))
            if clock() >= deadline:
                break
    except StopAsyncIteration:
        return Pulled(records, ended=True)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as failure:
        if _was_asked_for(failure):
            raise
        return Pulled(records, failure=failure)
    return Pulled(records)


def source_error(failure: BaseException, record: RecordId) -> BaseException:
    """Return `failure` as an error of the source at `record`; our own errors and requests to exit stay what they are."""
    if isinstance(failure, (AioLoaderError, KeyboardInterrupt, SystemExit, GeneratorExit)):
        return failure
    error = SourceError(
        f"expected a record from the upstream, got {type(failure).__name__}: {failure}; mend what its traceback shows", record=record
    )
    error.__cause__ = failure
    return error


@contextmanager
def located(record: RecordId, kinds: type[BaseException] = BaseException) -> Iterator[None]:
    """Raise what the upstream raises in this block as an error of the source at `record`.

    Where the block awaits, `kinds` is `Exception`: a cancellation is not the upstream's.
    """
    try:
        yield
    except kinds as failure:
        error = source_error(failure, record)
        if error is failure:
            raise
        raise error from failure


def _was_asked_for(failure: BaseException) -> bool:
    """Return whether `failure` is the cancellation of this very task."""
    if not isinstance(failure, anyio.get_cancelled_exc_class()):
        return False
    if not isinstance(failure, asyncio.CancelledError):
        return True  # trio makes these for its own scopes only
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
