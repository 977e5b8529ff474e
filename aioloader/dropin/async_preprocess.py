"""`AsyncPreprocessIterableDataset`: single preprocessed samples of a stream, made by several workers, in the order of the stream."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.utils.data

from aioloader.dropin.async_config import resolve_async_config
from aioloader.dropin.chain import warn_if_unsharded
from aioloader.dropin.dealing import as_source
from aioloader.dropin.epoch import SharedEpoch
from aioloader.dropin.handover import AsDone, hand_over
from aioloader.dropin.outer_worker import outer_worker, warn_of_unknown_batches
from aioloader.dropin.record_stream import check_outer_batch_size, checked_state, part_here
from aioloader.dropin.sample_iterator import OrderWatch, Place, SampleIterator
from aioloader.errors import ConfigError, ResumeError
from aioloader.loader import Loader
from aioloader.options import check_callable, check_choice
from aioloader.order.mesh import Mesh
from aioloader.protocols import Json, Source
from aioloader.sources import SequenceSource

__all__ = ["AsyncPreprocessIterableDataset"]

_WHERE = "AsyncPreprocessIterableDataset"
_VERSION = 1
_MAX_GROUP = 64  # beyond it, a hop costs next to nothing per sample
_MIN_GROUPS = 8  # that fill the buffer: a group in the trainer's hand is no longer counted by the engine, so the rest is made smaller by it


class AsyncPreprocessIterableDataset(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Yields the samples that `preprocess_fn` makes of the records of `dataset`, in the order of the records.

    `preprocess_fn` is called with one record at a time, as a dict of one-element lists, and returns a dict of lists of equal length, one
    value per sample, or something empty for a record that is left out. It runs in worker processes (or threads), started with the
    first sample; the dataset is read by one reader, and the workers never see it. All samples of a record come one after another.

    *Errors keep their place.* Everything before a failing record is given, then a `PreprocessError` or `SourceError` is raised that names
    the record and has the original as its cause, by that and every later call. No failure ends the iteration as if the data had ended.

    *Bounded.* At most `buffer_size` records are read and not handed out, also while the first of them is slow.

    *State.* `state_dict()` is as of the last sample handed out; loaded, it gives the next one first, with any number of workers. A state
    saved at the end begins the epoch again (in a DataLoader worker: it gives nothing, since other workers may have more). The epoch, which
    seeds the random numbers of each record together with its id, and which the dataset may shuffle by, changes with `set_epoch` only.

    *DataLoader workers* get parts of the records, none twice, each with workers of its own: prefer `num_workers=0` there. With
    `outer_batch_size` told and one sample per record, the order is that of `num_workers=0`; a warning says where it cannot be.

    *Ranks.* It deals nothing out: wrap a `DistributedIterableDataset` (a warning says so if it is missing). Samples are single ones:
    packing is a stage of its own after it, since a function that sees one record packs nothing; `aioloader.Loader` has one.

    A loop that is left ends what it started. Between passes the workers stay, until `close()` or until nothing refers to the dataset.

    Args:
        dataset: A `DistributedIterableDataset`, what `align_dataset` returned, a Hugging Face `IterableDataset` or `Dataset`, any iterable
            of mappings, or a function that returns one.
        preprocess_fn: A dict of lists to a dict of lists.
        buffer_size: Records in flight at most.
        num_workers: Workers; 0 does the work in the caller's thread. For what is left out see `resolve_async_config`.
        pool: "process", or "thread" for functions that let others run (each thread has its own copy of the function).
        host: See `Loader`; None: "process", or "thread" where the dataset cannot move to another process.
        seed: Seeds `random`, `numpy.random` and torch for each record.
        on_error: See `Loader`; also `worker_init`, `memory_limit` and `timeout_s` (of worker processes only).
        outer_batch_size: The `batch_size` of the DataLoader around it, 1 if that is None; needed for the order with several workers.

    Raises:
        ConfigError: An argument is something else.
    """

    aioloader_stage = "preprocess"

    def __init__(
        self,
        dataset: Any,
        preprocess_fn: Callable[..., Mapping[str, Any] | None],
        buffer_size: int | None = None,
        num_workers: int | None = None,
        *,
        pool: str = "process",
        host: str | None = None,
        seed: int = 0,
        on_error: Any = "raise",
        worker_init: Callable[[], Any] | None = None,
        memory_limit: int | str = "2GiB",
        timeout_s: float | None = None,
        outer_batch_size: int | None = None,
    ) -> None:
        self.buffer_size, self.num_workers = resolve_async_config(buffer_size, num_workers)
        self.dataset = dataset
        self.preprocess_fn = check_callable(
            f"{_WHERE}(preprocess_fn=)",
            preprocess_fn,
            expected="a function from a dict of lists to a dict of lists",
            do="pass the function that a batched map would get",
        )
        self.epoch = SharedEpoch()
        self._source = as_source(f"{_WHERE}(dataset=)", dataset)
        self._outer_batch_size = check_outer_batch_size(_WHERE, outer_batch_size)
        if host is not None:
            check_choice(f"{_WHERE}(host=)", host, ("process", "thread"))
        self._host = host
        self._options = {
            "pool": check_choice(f"{_WHERE}(pool=)", pool, ("process", "thread")),
            "seed": seed,
            "on_error": on_error,
            "worker_init": worker_init,
            "memory_limit": memory_limit,
            "timeout_s": timeout_s,
        }
        self._loader: Loader | None = None
        self._loader_of: tuple[int, int, int] | None = None
        self._iterator: weakref.ref[SampleIterator] | None = None
        self._place: Place | None = None
        self._loaded: dict[str, Any] | None = None
        self._make_loader(SequenceSource(()), "process").close()  # checks all options but the source
        warn_if_unsharded(dataset)

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a DataLoader worker without what runs here."""
        return {**self.__dict__, "_loader": None, "_loader_of": None, "_iterator": None, "_place": None}

    def __iter__(self) -> SampleIterator:
        """Start a pass at the loaded state, or at the beginning of the epoch; an earlier iterator ends."""
        worker = outer_worker()
        warn_of_unknown_batches(_WHERE, worker, self._outer_batch_size)
        loaded, self._loaded = self._current(), None
        self._end_iterator()
        epoch, watch = self.epoch.get(), OrderWatch(worker.count)
        if loaded is not None and loaded["ended"] and worker.is_worker:
            self._place = Place(epoch, lambda: loaded["loader"], ended=True)
            return SampleIterator(None, self._place, 0, watch)
        loader = self._running_loader()
        if loaded is None or loaded["loader"] is None or loaded["ended"]:
            _rewind(loader, epoch)
            state, num_to_skip = loader.state_dict(), 0
        else:
            state, num_to_skip = loaded["loader"], loaded["skip"]
        self._place = Place(epoch, lambda: state)
        iterator = SampleIterator(iter(loader), self._place, num_to_skip, watch)
        self._iterator = weakref.ref(iterator)
        return iterator

    def state_dict(self) -> Json:
        """Return the state as of the last sample handed out."""
        loaded, place = self._current(), self._place
        if loaded is not None:
            return loaded
        state = {"version": _VERSION, "kind": "samples", "worker": self._worker(), "epoch": self.epoch.get()}
        if place is None:
            return {**state, "loader": None, "skip": 0, "ended": False}
        return {**state, "epoch": place.epoch, "loader": place.before(), "skip": place.num_samples, "ended": place.ended}

    def load_state_dict(self, state: Json) -> None:
        """Load a state for the next pass; a pass that runs ends.

        Raises:
            ResumeError: It is of another dataset, function, seed, rank or DataLoader worker; lists each difference.
        """
        loaded = checked_state(_WHERE, state, "samples", ("worker", "epoch", "loader", "skip", "ended"))
        if loaded["worker"] != self._worker():
            raise ResumeError(
                [("DataLoader worker [index, count, outer_batch_size]", loaded["worker"], self._worker())],
                do="load it with as many workers",
                where=f"{_WHERE}.load_state_dict",
            )
        self._end_iterator()
        if loaded["loader"] is not None:
            self._running_loader().load_state_dict(loaded["loader"])
        self.epoch.set(loaded["epoch"])
        self._loaded = loaded

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next passes, also in persistent (forked) DataLoader workers. A loaded state of another epoch goes."""
        self.epoch.set(epoch)

    def stats(self) -> dict[str, Any]:
        """Return what `Loader.stats` says; empty before the first pass."""
        return {} if self._loader is None else self._loader.stats()

    def close(self) -> None:
        """End the workers and everything else that runs; safe to call twice, and another pass starts them again."""
        self._end_iterator()
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()

    def _current(self) -> dict[str, Any] | None:
        """Return the loaded state, unless another epoch was set since."""
        return self._loaded if self._loaded is not None and self._loaded["epoch"] == self.epoch.get() else None

    def _worker(self) -> list[int]:
        worker = outer_worker()
        return [worker.index, worker.count, (self._outer_batch_size or 1) if worker.count > 1 else 1]

    def _end_iterator(self) -> None:
        iterator = None if self._iterator is None else self._iterator()
        if iterator is not None:
            iterator.close()

    def _running_loader(self) -> Loader:
        """Return the loader of this process: a DataLoader worker that was forked inherits one that reads another part."""
        worker = outer_worker()
        present = (os.getpid(), worker.index, worker.count)
        if self._loader is None or self._loader_of != present:
            self._loader, self._loader_of = self._new_loader(part_here(self._source, self._outer_batch_size)), present
        return self._loader

    def _new_loader(self, source: Source) -> Loader:
        """Return a loader, in a thread of this process if the dataset cannot move to another and nothing else was asked for."""
        try:
            return self._make_loader(source, self._host or "process")
        except ConfigError as error:
            if error.where != "Loader(source)" or self._host is not None:
                raise
        return self._make_loader(source, "thread")

    def _make_loader(self, source: Source, host: str) -> Loader:
        group = min(_MAX_GROUP, max(1, self.buffer_size // _MIN_GROUPS))
        return Loader(
            source,
            preprocess=self.preprocess_fn,
            batched=True,
            batch=AsDone(group),
            collate=hand_over,
            mesh=Mesh(),
            workers=self.num_workers,
            buffer_size=self.buffer_size - group + 1,
            prefetch_batches=self.buffer_size,
            host=host,
            **self._options,
        )


def _rewind(loader: Loader, epoch: int) -> None:
    """Let the next pass be all of `epoch`."""
    if loader.epoch == epoch:
        loader.set_epoch(epoch + 1)  # a state that stands in this very epoch would be kept
    loader.set_epoch(epoch)
