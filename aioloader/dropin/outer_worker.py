"""The worker processes of a DataLoader around us: which of them this is, and how records are read so that nobody else deals them out too.

A DataLoader with W workers gives each a copy of the dataset and takes batches from them in turn. Ours deal the records out: worker w
gets blocks w, w + W, w + 2W, ... of `batch_size` records, so that the batches, taken in turn, have the order of the source. Other
datasets may look at the worker too (those of Hugging Face keep the file shards of one worker); beneath ours they must not, or records
would be dealt out twice and lost.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aioloader.errors import ConfigError

__all__ = ["OuterWorker", "hidden_outer_worker", "outer_worker", "warn_of_unknown_batches"]

_MODULE = "torch.utils.data._utils.worker"


@dataclass(frozen=True, slots=True)
class OuterWorker:
    """Worker `index` of `count` of the DataLoader around us; (0, 1) outside of one. `is_worker` tells (0, 1) inside of one from that."""

    index: int = 0
    count: int = 1
    is_worker: bool = False


class _Hiding:
    """The worker's facts while they are hidden: from code that reads beneath us, in its thread, not from ourselves in others."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.facts: Any = None
        self.local = threading.local()


_hiding = _Hiding()


def outer_worker() -> OuterWorker:
    """Return which worker of a DataLoader this process is."""
    if getattr(_hiding.local, "depth", 0):
        return OuterWorker()
    facts = _hiding.facts or _facts()
    return OuterWorker() if facts is None else OuterWorker(facts.id, facts.num_workers, is_worker=True)


def warn_of_unknown_batches(name: str, worker: OuterWorker, batch_size: int | None) -> None:
    """Say, once per DataLoader, that the order of the records hangs on something that cannot be known here."""
    if worker.count > 1 and worker.index == 0 and batch_size is None:
        warnings.warn(
            f"{name}: expected to know the batch_size of the DataLoader with {worker.count} workers around it, got outer_batch_size=None; "
            "records are dealt to the workers one by one: nothing is lost or repeated, but their order is that of the source only if "
            "batch_size is None or 1. Pass outer_batch_size=batch_size (1 to keep this way of dealing).",
            UserWarning,
            stacklevel=3,
        )


@contextmanager
def hidden_outer_worker() -> Iterator[None]:
    """Let code in this block see no DataLoader worker. Torch has no public way to say so.

    Another thread that asks torch at this very time sees none either.

    Raises:
        ConfigError: This version of torch keeps it in another place.
    """
    if not _hiding.depth and _facts() is None:
        yield
        return
    _hide()
    try:
        yield
    finally:
        _show()


def _hide() -> None:
    module: Any = sys.modules.get(_MODULE)
    with _hiding.lock:
        if not _hiding.depth:
            _hiding.facts, module._worker_info = module._worker_info, None
        _hiding.depth += 1
    _hiding.local.depth = getattr(_hiding.local, "depth", 0) + 1
    if _facts() is not None:
        _show()
        raise ConfigError(
            "DataLoader(num_workers=)",
            expected="0 around an aioloader dataset, with this version of torch",
            got="a worker process that torch keeps note of in an unknown place",
            do="use num_workers=0 there: the dataset has workers of its own",
        )


def _show() -> None:
    module: Any = sys.modules.get(_MODULE)
    _hiding.local.depth -= 1
    with _hiding.lock:
        _hiding.depth -= 1
        if not _hiding.depth:
            module._worker_info, _hiding.facts = _hiding.facts, None


def _facts() -> Any:
    """Return torch's facts of this worker, None outside of one; does not import torch."""
    data = sys.modules.get("torch.utils.data")
    return None if data is None else data.get_worker_info()
