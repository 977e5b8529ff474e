"""What the running engine needs of its neighbours: a pool to work and a sink to deliver to."""

from __future__ import annotations

from typing import Protocol

from aioloader.engine.output import Ready
from aioloader.engine.placement import Reserving
from aioloader.errors import AioLoaderError
from aioloader.pools.chunk import Block, Chunk

__all__ = ["Pool", "Sink"]


class Pool(Protocol):
    """What the pipeline needs of a pool."""

    capacity: int
    num_workers: int
    takes_destinations: bool
    """Whether workers write samples where a chunk says."""

    @property
    def held_bytes(self) -> int | None:
        """Return the bytes of results that are still in use, None where they are not known."""

    async def run(self, chunk: Chunk) -> Block:
        """Preprocess a chunk."""

    async def stacks(self) -> dict[str, str]:
        """Return where each worker stands."""


class Sink(Reserving, Protocol):
    """Where micro-batches go."""

    @property
    def has_room(self) -> bool:
        """Return whether one more micro-batch may wait for the trainer."""

    async def room(self) -> None:
        """Wait until one more micro-batch may wait for the trainer, which gets those handed over before."""

    async def delivery(self) -> None:
        """Wait until the trainer has taken one of those that wait for it, which must be some."""

    @property
    def num_waiting(self) -> int:
        """Return the micro-batches that wait for the trainer."""

    @property
    def waiting_bytes(self) -> int:
        """Return the bytes of the micro-batches that wait for the trainer, and of those reserved for workers to write to."""

    @property
    def headroom_bytes(self) -> int:
        """Return the bytes of the micro-batches that may be copied out of results which are still held."""

    async def put(self, ready: Ready) -> None:
        """Hand one over, in order; it may wait for company."""

    @property
    def num_kept(self) -> int:
        """Return the micro-batches that wait for company."""

    async def flush(self) -> None:
        """Let those that wait for company go."""

    def abort(self, error: AioLoaderError) -> None:
        """End the pass with an error after those handed over, from another thread than the engine's, which stands still."""
