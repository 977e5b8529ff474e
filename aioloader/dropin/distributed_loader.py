"""`DistributedDataLoader`: a map-style dataset, a sampler and a collator on the engine; its workers fetch by index."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from aioloader import options as check
from aioloader.batching import FixedBatch
from aioloader.bridge.rounds import has_other_ranks
from aioloader.dropin.index_feed import make_feed
from aioloader.dropin.sampler import DistributedSampler
from aioloader.errors import ConfigError
from aioloader.loader import Loader
from aioloader.order.mesh import Mesh
from aioloader.protocols import Json
from aioloader.sources.by_index import FetchByIndex
from aioloader.state.fingerprint import function_fingerprint, object_fingerprint

if TYPE_CHECKING:
    from aioloader.bridge.batch import Batch
    from aioloader.bridge.iterator import BatchIterator

__all__ = ["DistributedDataLoader"]

_WHERE = "DistributedDataLoader"


class DistributedDataLoader:
    """Delivers micro-batches of a map-style dataset to the ranks of a mesh: `for` and `async for`, with exact state.

    Assignment is by data-parallel coordinate: ranks that differ on another axis get identical batches. The dataset travels to the workers
    once; only indices travel after that. What a worker changes in its copy of the dataset stays there, and what the trainer changes later
    does not reach it; `set_epoch` of a dataset is called in the workers. Random numbers belong to the record and the epoch, with any number
    of workers.

    One loop is one pass over `epochs` epochs and the next one goes on, see `Loader`. A loaded state applies to the next loop. On another
    number of ranks, `aioloader.state.merge` of all ranks' states goes on exactly once: on any number with the default sampler and the
    default tail, else on one that divides `lanes`.

    Args:
        dataset: Anything with `__len__` and `__getitem__`.
        mesh: This rank's coordinates; required, see `DistributedSampler`.
        micro_batch_size: Samples per micro-batch; left out with `batch_sampler`.
        collator: Samples to a dict of arrays or tensors. Required: a wrong default would be a silent bug.
        sampler: A `DistributedSampler` of the same mesh, at the beginning of an epoch: its order, tail and mode are taken over, its place
            is not moved. Or any iterable of indices: the order of all ranks, which is dealt out by position, unless it
            deals by itself (it has `num_replicas` and `rank`, which must be those of the data-parallel axis, or is wrapped in
            `AlreadySharded`). The engine reads a copy, made now and without the dataset. It must give the same indices again for the
            same epoch, and is resumed by its `state_dict`, or by counting.
        batch_sampler: An iterable of lists of indices, each a micro-batch; dealt out like those of a sampler. Each list is fetched by one
            worker, by `__getitems__` where the dataset has it. `batch.samples` then names lists, in the order drawn.
        shuffle: Another order in each epoch (the default), or the dataset's own.
        seed: Of the shuffle and of the records' random numbers.
        tail: "drop" (the default), "pad" or "keep", as in `DistributedSampler`. "keep" delivers everything once, and fillers
            (`batch.is_filler`) to ranks that have nothing left, so that all make the same number of steps.
        drop_last: Leave out a last micro-batch that is not full. Default: with `tail="drop"`.
        num_workers: Worker processes; 0 runs everything inline.
        prefetch_factor: No more than prefetch_factor x num_workers micro-batches are fetched and not delivered yet. Where samples are
            small, `buffer_size=None` lets the workers read further ahead, and is faster; no more micro-batches than that wait all the same.
        pin_memory: Batches arrive in page-locked host memory, which copies to a GPU need to overlap with work. Without CUDA: a warning.
        persistent_workers: Accepted; workers stay alive between loops either way.
        preprocess: Runs in the workers, after reading; see `Loader`.
        epochs: Epochs per pass; None: without end.
        lanes: Logical streams, a multiple of `mesh.dp_size`; see `Loader`.
        options: Other options of `Loader`: `on_error`, `timeout_s`, `memory_limit`, `worker_init`, `host`, ...

    Raises:
        ConfigError: An argument is wrong, or arguments do not go together.
    """

    def __init__(
        self,
        dataset: Any,
        mesh: Mesh,
        micro_batch_size: int | None = None,
        *,
        collator: Callable[[list[Any]], Any],
        sampler: Any = None,
        batch_sampler: Any = None,
        shuffle: bool | None = None,
        seed: int = 0,
        tail: str | None = None,
        drop_last: bool | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        preprocess: Callable[..., Any] | None = None,
        epochs: int | None = 1,
        lanes: int | None = None,
        **options: Any,
    ) -> None:
        _check_dataset(dataset)
        if not isinstance(mesh, Mesh):
            raise ConfigError(f"{_WHERE}(mesh=)", expected="a Mesh", got=repr(mesh), do="pass Mesh.from_env() or this rank's coordinates")
        check.check_int(f"{_WHERE}(num_workers=)", num_workers, at_least=0, do="use 0 to run inline")
        check.check_int(f"{_WHERE}(prefetch_factor=)", prefetch_factor, at_least=1, do="allow at least one micro-batch per worker")
        self.dataset = dataset
        self.mesh = mesh
        self.sampler = sampler if batch_sampler is None else batch_sampler
        self.num_lanes = check.lane_map(lanes, mesh).num_lanes
        self._feed = make_feed(
            dataset,
            mesh,
            self.num_lanes,
            sampler,
            batch_sampler,
            micro_batch_size=micro_batch_size,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            drop_last=drop_last,
        )
        self._preprocess = preprocess
        self._epochs = epochs
        in_lists = batch_sampler is not None
        ahead = prefetch_factor * max(1, num_workers)
        if num_workers:
            options.setdefault("buffer_size", max(ahead, self.num_lanes // mesh.dp_size) * self._feed.batch_size)
        self._loader = Loader(
            self._feed.source,
            preprocess=FetchByIndex(dataset, preprocess, _identity(dataset, preprocess), in_lists=in_lists),
            batch=FixedBatch(self._feed.batch_size),
            collate=_CollateList(collator) if in_lists else collator,
            mesh=mesh,
            shuffle=self._feed.shuffle,
            seed=seed,
            epochs=epochs,
            lanes=lanes,
            workers=num_workers,
            prefetch_batches=ahead,
            end=self._feed.end,
            pin_memory=_can_pin(pin_memory),
            **options,
        )
        if isinstance(sampler, DistributedSampler):
            self._loader.set_epoch(sampler.epoch)

    def __iter__(self) -> BatchIterator:
        """Start a pass; earlier iterators of this loader end."""
        return self._loader.__iter__()

    def __aiter__(self) -> BatchIterator:
        """Start a pass; earlier iterators of this loader end."""
        return self._loader.__aiter__()

    def __len__(self) -> int:
        """Return the micro-batches of this rank in one whole pass.

        Raises:
            TypeError: It depends on the data: there is a `preprocess` function, a sampler without a length, or no last epoch.
        """
        size, batch_size = self._feed.num_positions, self._feed.batch_size
        if size is None or self._epochs is None or self._preprocess is not None:
            raise TypeError(
                "len(loader): expected a sampler with a length, no preprocess function and a number of epochs, got a loader whose number "
                "of micro-batches depends on the data; count the steps, or iterate until the end"
            )
        lanes = range(self.mesh.dp_rank, self.num_lanes, self.mesh.dp_size)
        if self._feed.end == "drop":
            per_lane = size // self.num_lanes // batch_size
        else:
            is_alone = not has_other_ranks(self.mesh.dp_size * self.mesh.num_peers)
            longest = lanes[0] if is_alone else 0  # ranks that know of each other end together
            per_lane = -(-(size - longest) // (self.num_lanes * batch_size))
        return per_lane * self._epochs * len(lanes)

    def __bool__(self) -> bool:
        """Return True, also where `len` is 0 or not known."""
        return True

    @property
    def epoch(self) -> int:
        """Return the epoch of the next record."""
        return self._loader.epoch

    @property
    def loader(self) -> Loader:
        """Return the engine's loader, for the rest of its surface: `replay`, `as_iterable_dataset`."""
        return self._loader

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one of the next pass, and tell the sampler. A loaded state that stands in that epoch is kept.

        Raises:
            ConfigError: An iterator is live.
        """
        self._loader.set_epoch(epoch)
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def state_dict(self, after: Batch | None = None) -> Json:
        """Return the state as of the last delivered batch, or as of `after`: any batch still held. See `Loader.state_dict`."""
        return self._loader.state_dict(after)

    def load_state_dict(self, state: Json, *, accept: Collection[str] = ()) -> None:
        """Load a state of this rank, or the merged state of all; it applies to the next loop. See `Loader.load_state_dict`.

        Raises:
            ResumeError: The state belongs to another configuration, or cannot be dealt to these lanes; lists each difference.
            ConfigError: An iterator is live and would not notice.
        """
        self._loader.load_state_dict(state, accept=accept)

    def stats(self) -> dict[str, Any]:
        """Return counts and times of each stage, and what became of the records; see `Loader.stats`."""
        return self._loader.stats()

    def close(self) -> None:
        """End the workers and everything else; safe to call twice."""
        self._loader.close()

    def __enter__(self) -> DistributedDataLoader:
        """Return the loader; leaving the block closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the loader."""
        self.close()

    async def __aenter__(self) -> DistributedDataLoader:
        """Return the loader; leaving the block closes it."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the loader."""
        self.close()

    def __repr__(self) -> str:
        """Return what it reads and how."""
        return f"<DistributedDataLoader of {len(self.dataset)} records, {self.mesh.describe()}, {self._loader!r}>"


def _check_dataset(dataset: Any) -> None:
    kind = type(dataset)
    if isinstance(dataset, torch.utils.data.IterableDataset) or not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        raise ConfigError(
            f"{_WHERE}(dataset=)",
            expected="a map-style dataset, with __len__ and __getitem__",
            got=f"a {kind.__qualname__}",
            do="use Loader, or DistributedIterableDataset, for a stream",
        )


def _identity(dataset: Any, preprocess: Callable[..., Any] | None) -> Json:
    """Return what distinguishes the data in a fingerprint."""
    own = getattr(dataset, "fingerprint", None)
    data = {"data": dict(own())} if callable(own) else {}
    return {"dataset": type(dataset).__qualname__, "num_records": len(dataset), "preprocess": function_fingerprint(preprocess), **data}


def _can_pin(pin_memory: bool) -> bool:
    if pin_memory and not torch.cuda.is_available():
        warnings.warn(
            f"{_WHERE}(pin_memory=True): expected a CUDA device, got none; batches stay in pageable memory.", UserWarning, stacklevel=3
        )
        return False
    return pin_memory


class _CollateList:
    """The collator for a sample that is a micro-batch: a tuple of samples."""

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self._collator = collator

    def __call__(self, samples: list[Any]) -> Any:
        """Return the collated micro-batch."""
        return self._collator(list(samples[0]))

    def fingerprint(self) -> Json:
        """Return that of the collator."""
        return {"kind": "list", "of": object_fingerprint(self._collator)}
