"""The training side: synchronized gradients, checkpoints and a small data-parallel trainer. Importing it imports torch."""

from __future__ import annotations

from aioloader.training.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from aioloader.training.gradients import GradientSynchronizer
from aioloader.training.loss import causal_lm_loss
from aioloader.training.reports import StepReport, TrainResult
from aioloader.training.trainer import Trainer

__all__ = [
    "Checkpoint",
    "GradientSynchronizer",
    "StepReport",
    "TrainResult",
    "Trainer",
    "causal_lm_loss",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
