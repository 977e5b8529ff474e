"""A map-style dataset read by its workers: the source hands out indices, and what stands at them is fetched where it is preprocessed.

    Indices: 7, 2, 9, ...    -->    worker: FetchByIndex(7) = preprocess(dataset[7])

The dataset travels once, with the function; what travels for each record is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aioloader.protocols import Cursor, Json, Record, Sample
from aioloader.sources.indexed import IndexedReader

__all__ = ["FetchByIndex", "Indices"]


class Indices:
    """The indices 0 to `num_records - 1` as records; ids are (name, index).

    Args:
        num_records: How many there are.
        name: The shard part of the record ids.
        with_epoch: Records are (epoch, index), for a dataset that changes with the epoch.
    """

    fetches_many = True

    def __init__(self, num_records: int, *, name: str = "dataset", with_epoch: bool = False) -> None:
        self._num_records = num_records
        self._name = name
        self._with_epoch = with_epoch
        self._epoch = 0

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Return the number of records; all are in one shard."""
        return (self._num_records,)

    def shard_name(self, shard: int) -> str:
        """Return the source's name."""
        return self._name

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the name and the number of records."""
        return {"kind": "indices", "name": self._name, "num_records": self._num_records}

    def start_epoch(self, epoch: int) -> None:
        """See `aioloader.protocols.IndexedSource.start_epoch`."""
        self._epoch = epoch

    def fetch(self, shard: int, rows: Sequence[int]) -> Sequence[Record]:
        """Return the rows themselves."""
        return [(self._epoch, row) for row in rows] if self._with_epoch else list(rows)

    def open(self, epoch: int, cursor: Cursor | None) -> IndexedReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`."""
        return IndexedReader(self, epoch, cursor)


class FetchByIndex:
    """Preprocessing that begins with reading: index -> `preprocess(dataset[index])`.

    Args:
        dataset: Anything with `__getitem__`. Its `set_epoch`, where it has one, is called when another epoch begins.
        preprocess: record -> sample, list of samples, or None; None: records are samples, whatever they are.
        identity: What distinguishes it from others in a loader's fingerprint.
        in_lists: It is called with lists of indices, and returns what is fetched by each list as one sample, a tuple; the whole list is
            asked for at once where the dataset has `__getitems__`.
    """

    def __init__(self, dataset: Any, preprocess: Callable[..., Any] | None, identity: Json, *, in_lists: bool = False) -> None:
        self._dataset = dataset
        self._preprocess = preprocess
        self._identity = identity
        self._in_lists = in_lists
        self._epoch: int | None = None

    @staticmethod
    def needs_epoch(dataset: Any) -> bool:
        """Return whether records are to be (epoch, index)."""
        return callable(getattr(dataset, "set_epoch", None))

    @property
    def is_one_to_one(self) -> bool:
        """Return whether each record makes one sample, so that the number of micro-batches is known beforehand."""
        return self._preprocess is None

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the identity."""
        return {"kind": "fetch", "of": self._identity}

    def __call__(self, record: Record, *context: Any) -> Any:
        """Return the samples of one record; `context` is what `worker_init` made."""
        if self.needs_epoch(self._dataset):
            epoch, record = record
            if epoch != self._epoch:
                self._dataset.set_epoch(epoch)
                self._epoch = epoch
        if self._in_lists:
            return tuple(sample for item in self._fetch_list(record) for sample in self._samples(item, context))
        made = self._dataset[record]
        if self._preprocess is not None:
            return self._preprocess(made, *context)
        return made if made is not None and type(made) is not list else [made]  # which would mean no sample, and several

    def _fetch_list(self, indices: Sequence[Any]) -> Iterable[Record]:
        get_many = getattr(self._dataset, "__getitems__", None)
        if callable(get_many):
            items: Iterable[Record] = get_many(list(indices))
            return items
        return [self._dataset[index] for index in indices]

    def _samples(self, item: Record, context: Sequence[Any]) -> Iterable[Sample]:
        if self._preprocess is None:
            return (item,)
        made = self._preprocess(item, *context)
        if made is None:
            return ()
        return made if type(made) is list else (made,)
