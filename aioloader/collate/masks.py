"""What attention needs so that no token of a packed row sees another document: a mask, a FlexAttention function, or varlen borders.

    row             a a a b b -       `-` is padding
    document_ids    0 0 0 1 1 -1
    mask            x                 query a0 sees a0
                    x x               query a1 sees a0 and a1
                    x x x
                          x           query b0 sees b0 only
                          x x
                              x       padding sees itself only, so that its softmax is finite

All three give the logits of each document as if it stood alone, with `position_ids` that restart in each. Nothing here
imports torch: tensors come in and tensors go out, on the device where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aioloader.errors import ConfigError

__all__ = ["block_diagonal_causal_mask", "flex_mask_mod", "varlen_arguments"]


def block_diagonal_causal_mask(document_ids: Any) -> Any:
    """Return bool[rows, 1, seq_len, seq_len], True where the query (third axis) sees the key (fourth axis).

    It is what `torch.nn.functional.scaled_dot_product_attention` takes as `attn_mask`, for any number of heads;
    `torch.nn.MultiheadAttention` wants its inverse. Its memory grows with seq_len squared: prefer the other forms for long rows.

    Args:
        document_ids: int[rows, seq_len], negative in padding; an array or a tensor, which decides what is returned.
    """
    documents = document_ids if hasattr(document_ids, "device") else np.asarray(document_ids)
    # Counting trues along a row gives 0, 1, 2, ... on the device of the document ids, in NumPy and in torch alike.
    place = (documents == documents).cumsum(1)
    query, key = documents[:, None, :, None], documents[:, None, None, :]
    query_place, key_place = place[:, None, :, None], place[:, None, None, :]
    return (query == key) & (query_place >= key_place) & ((query >= 0) | (query_place == key_place))


def flex_mask_mod(document_ids: Any) -> Callable[[Any, Any, Any, Any], Any]:
    """Return a `mask_mod` for `torch.nn.attention.flex_attention.create_block_mask(mask_mod, rows, None, seq_len, seq_len)`.

    Args:
        document_ids: A tensor int[rows, seq_len], negative in padding, on the device of the attention.

    Raises:
        ConfigError: It is no tensor.
    """
    if not hasattr(document_ids, "data_ptr"):
        do = "pass batch['document_ids'] as the loader delivers it, or torch.from_numpy(...) of it"
        raise ConfigError("flex_mask_mod(document_ids)", expected="a torch tensor", got=type(document_ids).__name__, do=do)

    def mask_mod(row: Any, head: Any, query: Any, key: Any) -> Any:
        document = document_ids[row, query]
        return (document == document_ids[row, key]) & (query >= key) & ((document >= 0) | (query == key))

    return mask_mod


def varlen_arguments(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that FlashAttention's varlen functions share, for a packed micro-batch.

        rows, seq_len, heads, dim = query.shape
        flatten = lambda x: x.reshape(rows * seq_len, heads, dim)
        out = flash_attn_varlen_func(flatten(query), flatten(key), flatten(value), causal=True, **varlen_arguments(batch))

    `cu_seqlens_q` and `cu_seqlens_k` are the same int32[num_segments + 1] over all rows * seq_len tokens, `max_seqlen_q` and
    `max_seqlen_k` ints. The padding at a row's end is a segment of its own: nothing has to be gathered or scattered, its
    outputs are finite, and its labels are ignored. The ints are read from `max_seqlen`: on a batch that has been moved to a
    device this waits for it, so take them before or once per step, not per layer.

    Raises:
        ConfigError: The batch has no `cu_seqlens` and `max_seqlen`: it was not packed.
    """
    if "cu_seqlens" not in batch or "max_seqlen" not in batch:
        do = "batch with Pack, and collate with PretrainCollator or SftCollator"
        raise ConfigError("varlen_arguments(batch)", expected="a packed micro-batch", got=f"fields {sorted(batch)}", do=do)
    borders, longest = batch["cu_seqlens"], int(batch["max_seqlen"])
    return {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": longest, "max_seqlen_k": longest}
