"""Models whose gradients cannot be averaged bucket by bucket are refused before the first step."""

from __future__ import annotations

from torch import nn

from aioloader.errors import ConfigError

__all__ = ["check_model"]

_SYNCHRONIZES_ITSELF = {
    "FSDPModule": "is sharded by fully_shard",
    "FullyShardedDataParallel": "is sharded by FullyShardedDataParallel",
    "DistributedDataParallel": "is wrapped in DistributedDataParallel",
}


def check_model(model: nn.Module) -> None:
    """Refuse sparse layers, and models of which something else averages the gradients.

    Classes are known by their names: importing them would import much of torch.distributed.

    Raises:
        ConfigError: With what to do instead.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            do = "make the embedding with sparse=False"
            raise ConfigError(f"layer {name or 'model'}", expected="dense gradients", got="sparse ones", do=do)
        for kind in type(module).__mro__:
            if kind.__name__ in _SYNCHRONIZES_ITSELF and kind.__module__.startswith("torch."):
                raise _not_ours(f"layer {name or 'model'}", f"one that {_SYNCHRONIZES_ITSELF[kind.__name__]}")
    for name, parameter in model.named_parameters():
        if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
            raise _not_ours(f"parameter {name}", "a DTensor, which is spread over a device mesh")


def _not_ours(where: str, got: str) -> ConfigError:
    do = "leave GradientSynchronizer out: FSDP, DDP and DTensor synchronize gradients by themselves"
    return ConfigError(where, expected="plain parameters, whole on every data-parallel rank", got=got, do=do)
