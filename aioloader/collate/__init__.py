"""Collation: the samples of one micro-batch become NumPy arrays. No torch; tensors appear at the bridge, without a copy."""

from aioloader.collate.counts import TokenCounts, count_tokens
from aioloader.collate.pretrain import PretrainCollator
from aioloader.collate.sft import SftCollator
from aioloader.collate.stack import StackCollator

__all__ = ["PretrainCollator", "SftCollator", "StackCollator", "TokenCounts", "count_tokens"]
