"""aioloader: the asyncio-native streaming data loader for distributed PyTorch training.

Importing it starts nothing and imports neither torch nor NumPy; names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioloader.batching import Bucket, FixedBatch, Pack, TokenBudget
    from aioloader.batching.balanced import Balanced
    from aioloader.bridge.batch import Batch, SampleInfo
    from aioloader.collate import PretrainCollator, SftCollator, StackCollator
    from aioloader.errors import (
        AioLoaderError,
        BatchError,
        ClosedError,
        ConfigError,
        HostError,
        PreprocessError,
        ResumeError,
        SourceError,
        StallError,
        SynchronizationError,
        UnevenEndError,
        WorkerError,
    )
    from aioloader.faults import Quarantine, Retry
    from aioloader.loader import Loader
    from aioloader.order.already_sharded import AlreadySharded
    from aioloader.order.mesh import Mesh
    from aioloader.order.mixture import Mixture
    from aioloader.order.schedule import Ramp, Steps
    from aioloader.order.shuffle import Shuffle
    from aioloader.pools.rng import record_rng
    from aioloader.sources import AsyncIterableSource, IterableSource, JsonLines, SequenceSource, TextFiles
    from aioloader.telemetry.advice import suggest_async_config
    from aioloader.training import GradientSynchronizer, StepReport, Trainer, TrainResult

_HOME = {
    "AioLoaderError": "errors",
    "AlreadySharded": "order.already_sharded",
    "AsyncIterableSource": "sources",
    "Balanced": "batching.balanced",
    "Batch": "bridge.batch",
    "BatchError": "errors",
    "Bucket": "batching",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "FixedBatch": "batching",
    "GradientSynchronizer": "training",
    "HostError": "errors",
    "IterableSource": "sources",
    "JsonLines": "sources",
    "Loader": "loader",
    "Mesh": "order.mesh",
    "Mixture": "order.mixture",
    "Pack": "batching",
    "PreprocessError": "errors",
    "PretrainCollator": "collate",
    "Quarantine": "faults",
    "Ramp": "order.schedule",
    "ResumeError": "errors",
    "Retry": "faults",
    "SampleInfo": "bridge.batch",
    "SequenceSource": "sources",
    "SftCollator": "collate",
    "Shuffle": "order.shuffle",
    "SourceError": "errors",
    "StackCollator": "collate",
    "StallError": "errors",
    "StepReport": "training",
    "Steps": "order.schedule",
    "SynchronizationError": "errors",
    "TextFiles": "sources",
    "TokenBudget": "batching",
    "TrainResult": "training",
    "Trainer": "training",
    "UnevenEndError": "errors",
    "WorkerError": "errors",
    "record_rng": "pools.rng",
    "suggest_async_config": "telemetry.advice",
}

__all__ = [
    "AioLoaderError",
    "AlreadySharded",
    "AsyncIterableSource",
    "Balanced",
    "Batch",
    "BatchError",
    "Bucket",
    "ClosedError",
    "ConfigError",
    "FixedBatch",
    "GradientSynchronizer",
    "HostError",
    "IterableSource",
    "JsonLines",
    "Loader",
    "Mesh",
    "Mixture",
    "Pack",
    "PreprocessError",
    "PretrainCollator",
    "Quarantine",
    "Ramp",
    "ResumeError",
    "Retry",
    "SampleInfo",
    "SequenceSource",
    "SftCollator",
    "Shuffle",
    "SourceError",
    "StackCollator",
    "StallError",
    "StepReport",
    "Steps",
    "SynchronizationError",
    "TextFiles",
    "TokenBudget",
    "TrainResult",
    "Trainer",
    "UnevenEndError",
    "WorkerError",
    "record_rng",
    "suggest_async_config",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'aioloader' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"aioloader.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*globals(), *__all__])
