"""Context parallelism: the part of each sequence that one rank gets.

    C = 2 ranks, a row of 8 tokens       contiguous: C chunks          zigzag: 2 C chunks, rank r gets r and 2 C - 1 - r

    tokens                               0 1 2 3 4 5 6 7               0 1 2 3 4 5 6 7
    rank                                 0 0 0 0 1 1 1 1               0 0 1 1 1 1 0 0

In causal attention token t looks at t + 1 tokens, so that late chunks cost more than early ones; in zigzag every rank has the same
work. With `per_document`, each document is cut like this by itself, so that each rank has the same part of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from aioloader.collate.labels import IGNORE_INDEX, shift_left
from aioloader.collate.options import require_bool
from aioloader.errors import BatchError, ConfigError
from aioloader.order.mesh import Mesh

__all__ = ["ContextParallel", "context_parallel_indices"]

_LAYOUTS: Final = ("zigzag", "contiguous")
_GLOBAL: Final = {"cu_seqlens": "global_cu_seqlens", "max_seqlen": "global_max_seqlen"}
"""Renamed, as what takes them for those of the local tokens would read beyond their end."""


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """A collator that gives this rank its part of what another one collates: the tokens of its place on the context-parallel axis.

    Every field that starts with the axes of `input_ids`, [rows, seq_len], is cut along the second one; others are left whole. The
    union over the ranks is the whole micro-batch, each token once, in rising order on each rank.

        `labels`: shifted, so that `labels[t]` is the target of input t: the target of a chunk's last token is the first token of the
            next chunk, which lies on another rank. A loss must not shift them again (Hugging Face models take them as `shift_labels=`).
            Summed over the ranks of the axis, losses and targets are those of the whole; divide by the global number of targets.
        `position_ids`: as in the whole; made (restarting at each border) where `collate` gives none, since a model would count from 0.
        `global_cu_seqlens`, `global_max_seqlen`: `cu_seqlens` and `max_seqlen` of the whole, for attention across the ranks.

    By default each row is cut as a whole, into [rows, seq_len / C]. With `per_document` each document of a packed micro-batch is
    filled up with padding to a multiple of 2 C tokens (C if contiguous) and cut by itself. All rows are laid end to end, into [1,
    padded tokens / C], `document_ids` are counted through, and `global_cu_seqlens` are the borders of the padded documents; those of the
    local tokens are `global_cu_seqlens // C`, on every rank. Padding stands behind its document, so causal attention needs no mask.

    State and fingerprint do not depend on the rank, nor on C: a run may go on with another number of context-parallel ranks.

    Attributes:
        collate: The collator of the whole micro-batch. Padding is filled with its `pad_token_id` and `ignore_index` if it has them.
        mesh: Gives `cp_rank` and `cp_size` (C). With one rank, all of the above holds all the same.
        layout: `"zigzag"` or `"contiguous"`.
        per_document: True for attention that rings in each document by itself.
        labels_shifted: Whether `collate` gives shifted labels; by default what its `shift_labels` says, else no.

    Raises:
        ConfigError: An option is of the wrong type or unknown.
        BatchError (when called): There are no 2-D `input_ids`, or `seq_len` cannot be cut; with `per_document`, there are no `cu_seqlens`.

    Source: the zigzag order is that of Megatron-LM's `get_batch_on_this_cp_rank` and, per document, of Transformer Engine's
    `thd_get_partitioned_indices` and ring-flash-attention's `zigzag_ring_flash_attn_varlen`, which ask for multiples of 2 C and take
    padded `cu_seqlens` and `cu_seqlens // C`; contiguous is that of its `ring_flash_attn` and (not per document) `llama3_flash_attn`.
    """

    collate: Callable[[list[Any]], Mapping[str, Any]]
    mesh: Mesh
    _: KW_ONLY
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    per_document: bool = False
    labels_shifted: bool | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        if not callable(self.collate):
            do = "pass one, e.g. PretrainCollator()"
            raise ConfigError("ContextParallel(collate)", expected="a collator", got=repr(self.collate), do=do)
        if not isinstance(self.mesh, Mesh):
            do = "pass that of the loader, e.g. Mesh.from_device_mesh(...)"
            raise ConfigError("ContextParallel(mesh)", expected="a Mesh", got=repr(self.mesh), do=do)
        if self.layout not in _LAYOUTS:
            raise ConfigError("ContextParallel(layout=)", expected="'zigzag' or 'contiguous'", got=repr(self.layout), do="use one of these")
        require_bool("ContextParallel(per_document=)", self.per_document)
        if self.labels_shifted is not None:
            require_bool("ContextParallel(labels_shifted=)", self.labels_shifted)

    def __call__(self, samples: list[Any], /) -> dict[str, Any]:
        """Return this rank's part of the micro-batch."""
        return self.cut(self.whole(samples))

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that decide the arrays of all ranks together."""
        options = {"layout": self.layout, "per_document": self.per_document, "labels_shifted": self._is_shifted}
        return {"kind": "ContextParallel", "collate": self.collate, **options}

    def whole(self, samples: list[Any], /) -> dict[str, Any]:
        """Return the micro-batch of all ranks, ready to be cut: labels shifted, documents padded, borders renamed."""
        batch = dict(self.collate(samples))
        shape = _token_shape(batch)
        batch = {name: np.asarray(value) if _is_per_token(value, shape) else value for name, value in batch.items()}
        if "labels" in batch and not self._is_shifted:
            batch["labels"] = shift_left(batch["labels"], self._ignore_index)
        borders = np.asarray(batch["cu_seqlens"]) if "cu_seqlens" in batch else np.arange(shape[0] + 1) * shape[1]
        if "position_ids" not in batch:
            batch["position_ids"] = np.arange(borders[-1]).reshape(shape) - np.repeat(borders[:-1], np.diff(borders)).reshape(shape)
        if self.per_document:
            batch = self._padded(batch, shape, borders)
        elif shape[1] % self._multiple:
            raise BatchError(
                f"ContextParallel: expected seq_len to be a multiple of {self._multiple} for cp_size={self.mesh.cp_size} and "
                f"layout={self.layout!r}, got {shape[1]}; choose such a seq_len or pad_to_multiple_of={self._multiple}"
            )
        return {_GLOBAL.get(name, name): value for name, value in batch.items()}

    def cut(self, batch: Mapping[str, Any], cp_rank: int | None = None) -> dict[str, Any]:
        """Return the part of one rank, by default this one's, of what `whole` returned: arrays, or tensors made of them."""
        indices = self._indices(batch)[self.mesh.cp_rank if cp_rank is None else cp_rank]
        shape = _token_shape(batch)
        return {name: value[:, indices] if _is_per_token(value, shape) else value for name, value in batch.items()}

    def gather(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what `whole` returned, of the parts of all ranks in their order, as arrays: the inverse of `cut`."""
        shape = _token_shape(parts[0])
        joined = {
            name: np.concatenate([np.asarray(part[name]) for part in parts], axis=1) if _is_per_token(value, shape) else value
            for name, value in parts[0].items()
        }
        places = np.argsort(self._indices(joined).ravel())
        return {name: value[:, places] if _is_per_token(value, _token_shape(joined)) else value for name, value in joined.items()}

    @property
    def _is_shifted(self) -> bool:
        return bool(getattr(self.collate, "shift_labels", False)) if self.labels_shifted is None else self.labels_shifted

    @property
    def _ignore_index(self) -> int:
        return int(getattr(self.collate, "ignore_index", IGNORE_INDEX))

    @property
    def _multiple(self) -> int:
        return self.mesh.cp_size * (2 if self.layout == "zigzag" else 1)

    def _indices(self, batch: Mapping[str, Any]) -> NDArray[np.int64]:
        borders = batch["global_cu_seqlens"] if self.per_document else [0, _token_shape(batch)[1]]
        return context_parallel_indices(borders, self.mesh.cp_size, self.layout)

    def _padded(self, batch: Mapping[str, Any], shape: tuple[int, int], borders: NDArray[Any]) -> dict[str, Any]:
        """Return the batch with all rows laid end to end and each document followed by padding up to a multiple of tokens."""
        if "cu_seqlens" not in batch:
            got = f"fields {sorted(batch)}"
            raise BatchError(
                f"ContextParallel(per_document=True): expected a packed micro-batch with 'cu_seqlens', got {got}; batch with Pack"
            )
        lengths = np.diff(borders)
        padded = -(-lengths // self._multiple) * self._multiple
        ends = np.cumsum(padded)
        target = np.arange(borders[-1]) + np.repeat(ends - padded - borders[:-1], lengths)
        fills = {"input_ids": int(getattr(self.collate, "pad_token_id", 0)), "labels": self._ignore_index, "document_ids": -1}
        flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in batch.items() if _is_per_token(value, shape)}
        if "document_ids" in flat:
            is_document = flat["document_ids"][borders[:-1]] >= 0
            ids = np.where(is_document, np.cumsum(is_document) - 1, -1).astype(flat["document_ids"].dtype)
            flat["document_ids"] = np.repeat(ids, lengths)
        spread: dict[str, Any] = {}
        for name, value in flat.items():
            spread[name] = np.full((1, ends[-1], *value.shape[1:]), fills.get(name, 0), dtype=value.dtype)
            spread[name][0, target] = value
        numbers = {"cu_seqlens": np.append(0, ends).astype(borders.dtype), "max_seqlen": np.array(padded.max(), dtype=borders.dtype)}
        return {**batch, **spread, **numbers}


def context_parallel_indices(borders: Any, cp_size: int, layout: str = "zigzag") -> NDArray[np.int64]:
    """Return int64[cp_size, num_tokens / cp_size], the tokens of each rank, rising.

    Args:
        borders: int[num_segments + 1], rising from 0 to num_tokens. Each segment is cut by itself, and its length is a multiple of
            `2 * cp_size`, or of `cp_size` if contiguous.
        cp_size: Number of ranks.
        layout: `"zigzag"` or `"contiguous"`.
    """
    borders = np.asarray(borders)
    lengths = np.diff(borders)
    num_chunks = cp_size * (2 if layout == "zigzag" else 1)
    chunk = (np.arange(borders[-1]) - np.repeat(borders[:-1], lengths)) // np.repeat(lengths // num_chunks, lengths)
    rank = np.minimum(chunk, num_chunks - 1 - chunk) if layout == "zigzag" else chunk
    # A stable sort of 16-bit numbers is a radix sort.
    return np.argsort(rank.astype(np.int16), kind="stable").reshape(cp_size, -1)


def _token_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    shape = tuple(getattr(batch.get("input_ids"), "shape", ()))
    if len(shape) != 2:
        got = f"fields {sorted(batch)}" if "input_ids" not in batch else f"shape {list(shape)}"
        raise BatchError(f"ContextParallel: expected 'input_ids' of shape [rows, seq_len], got {got}; collate token ids")
    return shape


def _is_per_token(value: Any, shape: tuple[int, int]) -> bool:
    return tuple(getattr(value, "shape", ())[:2]) == shape
