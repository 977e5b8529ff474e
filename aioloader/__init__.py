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
    from aioloader.collate import ContextParallel, PreferenceCollator, PretrainCollator, SftCollator, StackCollator
    from aioloader.dropin.align import DatasetAttr, align_dataset
    from aioloader.dropin.async_config import resolve_async_config
    from aioloader.dropin.async_preprocess import AsyncPreprocessIterableDataset
    from aioloader.dropin.distributed_iterable import DistributedIterableDataset
    from aioloader.dropin.distributed_loader import DistributedDataLoader
    from aioloader.dropin.mmap_tokens import MMapTokens
    from aioloader.dropin.packed_dataset import PackedDataset
    from aioloader.dropin.sampler import DistributedSampler
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
    from aioloader.sources import AsyncIterableSource, IterableSource, JsonLines, ParquetFiles, SequenceSource, TextFiles
    from aioloader.telemetry.advice import suggest_async_config
    from aioloader.tokens.megatron import MegatronTokens
    from aioloader.training import (
        ClipGradNorm,
        DevicePrefetcher,
        DynamicLossScale,
        GradientSynchronizer,
        MixedPrecisionManager,
        SkipNonFinite,
        StepReport,
        TensorBoardLogger,
        Trainer,
        TrainResult,
        evaluate,
    )

_HOME = {
    "AioLoaderError": "errors",
    "AlreadySharded": "order.already_sharded",
    "AsyncIterableSource": "sources",
    "AsyncPreprocessIterableDataset": "dropin.async_preprocess",
    "Balanced": "batching.balanced",
    "Batch": "bridge.batch",
    "BatchError": "errors",
    "Bucket": "batching",
    "ClipGradNorm": "training",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "ContextParallel": "collate",
    "DatasetAttr": "dropin.align",
    "DevicePrefetcher": "training",
    "DistributedDataLoader": "dropin.distributed_loader",
    "DistributedIterableDataset": "dropin.distributed_iterable",
    "DistributedSampler": "dropin.sampler",
    "DynamicLossScale": "training",
    "FixedBatch": "batching",
    "GradientSynchronizer": "training",
    "HostError": "errors",
    "IterableSource": "sources",
    "JsonLines": "sources",
    "Loader": "loader",
    "MMapTokens": "dropin.mmap_tokens",
    "MegatronTokens": "tokens.megatron",
    "Mesh": "order.mesh",
    "MixedPrecisionManager": "training",
    "Mixture": "order.mixture",
    "Pack": "batching",
    "PackedDataset": "dropin.packed_dataset",
    "ParquetFiles": "sources",
    "PreferenceCollator": "collate",
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
    "SkipNonFinite": "training",
    "SourceError": "errors",
    "StackCollator": "collate",
    "StallError": "errors",
    "StepReport": "training",
    "Steps": "order.schedule",
    "SynchronizationError": "errors",
    "TensorBoardLogger": "training",
    "TextFiles": "sources",
    "TokenBudget": "batching",
    "TrainResult": "training",
    "Trainer": "training",
    "UnevenEndError": "errors",
    "WorkerError": "errors",
    "align_dataset": "dropin.align",
    "evaluate": "training",
    "record_rng": "pools.rng",
    "resolve_async_config": "dropin.async_config",
    "suggest_async_config": "telemetry.advice",
}

__all__ = [
    "AioLoaderError",
    "AlreadySharded",
    "AsyncIterableSource",
    "AsyncPreprocessIterableDataset",
    "Balanced",
    "Batch",
    "BatchError",
    "Bucket",
    "ClipGradNorm",
    "ClosedError",
    "ConfigError",
    "ContextParallel",
    "DatasetAttr",
    "DevicePrefetcher",
    "DistributedDataLoader",
    "DistributedIterableDataset",
    "DistributedSampler",
    "DynamicLossScale",
    "FixedBatch",
    "GradientSynchronizer",
    "HostError",
    "IterableSource",
    "JsonLines",
    "Loader",
    "MMapTokens",
    "MegatronTokens",
    "Mesh",
    "MixedPrecisionManager",
    "Mixture",
    "Pack",
    "PackedDataset",
    "ParquetFiles",
    "PreferenceCollator",
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
    "SkipNonFinite",
    "SourceError",
    "StackCollator",
    "StallError",
    "StepReport",
    "Steps",
    "SynchronizationError",
    "TensorBoardLogger",
    "TextFiles",
    "TokenBudget",
    "TrainResult",
    "Trainer",
    "UnevenEndError",
    "WorkerError",
    "align_dataset",
    "evaluate",
    "record_rng",
    "resolve_async_config",
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
