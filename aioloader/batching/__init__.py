"""Batching: how the samples of one lane become micro-batches. Pure: no async, no clock, no I/O, no torch."""

from aioloader.batching.fixed import FixedBatch
from aioloader.batching.pack import Pack

__all__ = ["FixedBatch", "Pack"]
