"""Batching: how the samples of one lane become micro-batches. Pure: no async, no clock, no I/O, no torch."""

from aioloader.batching.balancing import balance, imbalance
from aioloader.batching.bins import pack_lengths
from aioloader.batching.bucket import Bucket
from aioloader.batching.fixed import FixedBatch
from aioloader.batching.pack import Pack
from aioloader.batching.token_budget import TokenBudget
from aioloader.batching.trajectory import Message, fit_messages, join_messages

__all__ = [
    "Bucket",
    "FixedBatch",
    "Message",
    "Pack",
    "TokenBudget",
    "balance",
    "fit_messages",
    "imbalance",
    "join_messages",
    "pack_lengths",
]
