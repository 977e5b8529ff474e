"""Batching: how the samples of one lane become micro-batches. Pure: no async, no clock, no I/O, no torch."""

from aioloader.batching.bucket import Bucket
from aioloader.batching.fixed import FixedBatch
from aioloader.batching.pack import Pack
from aioloader.batching.token_budget import TokenBudget

__all__ = ["Bucket", "FixedBatch", "Pack", "TokenBudget"]
