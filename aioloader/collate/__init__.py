"""Collation: the samples of one micro-batch become NumPy arrays. No torch; tensors appear at the bridge, without a copy."""

from aioloader.collate.context_parallel import ContextParallel, context_parallel_indices
from aioloader.collate.counts import TokenCounts, count_tokens
from aioloader.collate.masks import block_diagonal_causal_mask, flex_mask_mod, varlen_arguments
from aioloader.collate.preference import PreferenceCollator
from aioloader.collate.pretrain import PretrainCollator
from aioloader.collate.sft import SftCollator
from aioloader.collate.stack import StackCollator

__all__ = [
    "ContextParallel",
    "PreferenceCollator",
    "PretrainCollator",
    "SftCollator",
    "StackCollator",
    "TokenCounts",
    "block_diagonal_causal_mask",
    "context_parallel_indices",
    "count_tokens",
    "flex_mask_mod",
    "varlen_arguments",
]
