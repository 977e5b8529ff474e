"""The training side: synchronized gradients, mixed precision, checkpoints and a small data-parallel trainer. Importing it imports torch."""

from __future__ import annotations

from aioloader.training.averages import StepAverages, average_reports
from aioloader.training.checkpoints.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from aioloader.training.device_prefetch import DevicePrefetcher
from aioloader.training.evaluation import evaluate
from aioloader.training.gradients.sync_stats import SyncStats
from aioloader.training.gradients.synchronizer import GradientSynchronizer
from aioloader.training.json_lines_log import JsonLinesLog
from aioloader.training.loss import causal_lm_loss
from aioloader.training.precision.loss_scaling import DynamicLossScale
from aioloader.training.precision.manager import MixedPrecisionManager, StepInfo
from aioloader.training.precision.transforms import ClipGradNorm, SkipNonFinite
from aioloader.training.reports import Evaluation, StepReport, TrainResult
from aioloader.training.tensorboard import TensorBoardLogger
from aioloader.training.trainer import Trainer

__all__ = [
    "Checkpoint",
    "ClipGradNorm",
    "DevicePrefetcher",
    "DynamicLossScale",
    "Evaluation",
    "GradientSynchronizer",
    "JsonLinesLog",
    "MixedPrecisionManager",
    "SkipNonFinite",
    "StepAverages",
    "StepInfo",
    "StepReport",
    "SyncStats",
    "TensorBoardLogger",
    "TrainResult",
    "Trainer",
    "average_reports",
    "causal_lm_loss",
    "evaluate",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
