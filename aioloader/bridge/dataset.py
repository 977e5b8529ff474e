"""A loader as a `torch.utils.data.IterableDataset`, for code that insists on a DataLoader around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch.utils.data

from aioloader.errors import ConfigError
from aioloader.protocols import Json

if TYPE_CHECKING:
    from aioloader.bridge.batch import Batch

__all__ = ["LoaderDataset"]


class _Loader(Protocol):
    def __iter__(self) -> Iterator[Batch]: ...
    def __len__(self) -> int: ...
    def state_dict(self) -> Json: ...
    def load_state_dict(self, state: Json) -> None: ...
    def set_epoch(self, epoch: int) -> None: ...


class LoaderDataset(torch.utils.data.IterableDataset[Any]):
    """Yields the loader's batches. Use `DataLoader(dataset, batch_size=None)`, with at most one worker process.

    Has `state_dict` and `load_state_dict`, so StatefulDataLoader resumes it exactly.
    """

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        """Iterate one pass of the loader.

        Raises:
            ConfigError: Several worker processes would each deliver all batches.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ConfigError(
                "DataLoader(num_workers=)",
                expected="0 or 1 around an aioloader dataset, which has workers of its own",
                got=worker.num_workers,
                do="pass num_workers=0 there and workers= to Loader; each DataLoader worker would repeat all batches",
            )
        return iter(self._loader)

    def __len__(self) -> int:
        """Return the micro-batches of one pass.

        Raises:
            TypeError: It depends on the data.
        """
        return len(self._loader)

    def state_dict(self) -> Json:
        """Return the loader's state as of the last delivered batch."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Json) -> None:
        """Load a state for the next pass."""
        self._loader.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self._loader.set_epoch(epoch)
