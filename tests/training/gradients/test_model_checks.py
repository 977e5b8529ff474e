"""Layers whose gradients cannot travel in flat buckets are refused before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aioloader.errors import ConfigError
from aioloader.order.mesh import Mesh
from aioloader.training.gradients.synchronizer import GradientSynchronizer


def test_layers_with_sparse_gradients_are_refused() -> None:
    for layer in (nn.Embedding(4, 2, sparse=True), nn.EmbeddingBag(4, 2, sparse=True, mode="sum")):
        with pytest.raises(ConfigError, match="layer 0: expected dense gradients, got sparse ones; make the embedding with sparse=False"):
            GradientSynchronizer(nn.Sequential(layer, nn.Linear(2, 2, dtype=torch.float64)), Mesh())
