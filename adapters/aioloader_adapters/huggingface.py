"""Sources for Hugging Face `datasets`: `Dataset` is read by index, `IterableDataset` as a stream with state."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from aioloader.errors import ConfigError
from aioloader.protocols import Cursor, Json, Record, Source
from aioloader.sources.indexed import IndexedReader
from aioloader.sources.stream import StreamReader, Upstream

__all__ = ["HuggingFaceDataset", "HuggingFaceStream", "adapt"]

EXACT_SINCE = (5, 2)
"""The first `datasets` release whose states were compared, record by record, with reading through."""
EXACT_STEPS = frozenset(
    {
        "ArrowExamplesIterable",
        "CyclingMultiSourcesExamplesIterable",
        "ExamplesIterable",
        "FilteredExamplesIterable",
        "FormattedExamplesIterable",
        "MappedExamplesIterable",
        "RandomlyCyclingMultiSourcesExamplesIterable",
        "RebatchedArrowExamplesIterable",
        "RepeatExamplesIterable",
        "SelectColumnsIterable",
        "SkipExamplesIterable",
        "StepExamplesIterable",
        "TakeExamplesIterable",
        "VerticallyConcatenatedMultiSourcesExamplesIterable",
    }
)
"""Steps of a stream that resume exactly at every record. A shuffle buffer is not among them: its state leaves the buffer out."""


def adapt(obj: object) -> Source | None:
    """Return the source for a `Dataset` or `IterableDataset`, else None; never imports `datasets`."""
    datasets = sys.modules.get("datasets")
    if datasets is None:
        return None
    if isinstance(obj, datasets.Dataset):
        return HuggingFaceDataset(obj)
    if isinstance(obj, datasets.IterableDataset):
        return HuggingFaceStream(obj)
    return None


class HuggingFaceDataset:
    """The rows of a `datasets.Dataset` by rising index, in the dataset's own format; record ids are (name, row).

    Plain Python rows are read in slices. In any other format rows are read one by one, since a slice would make arrays whose
    type depends on the neighbouring rows, or call a transform with several of them.

    Args:
        dataset: A `datasets.Dataset`.
        name: The shard part of the record ids; by default what the dataset says of itself.
    """

    def __init__(self, dataset: Any, name: str | None = None) -> None:
        self._dataset = dataset
        self._name = name or _name_of(dataset)

    def __repr__(self) -> str:
        return f"HuggingFaceDataset({self._name!r}, num_records={self.num_records})"

    @property
    def num_records(self) -> int:
        """Return the number of rows."""
        return len(self._dataset)

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the dataset's own fingerprint, which follows its data, transforms and format."""
        return {
            "kind": "huggingface_dataset",
            "name": self._name,
            "num_records": self.num_records,
            "features": str(self._dataset.features),
            "fingerprint": self._dataset._fingerprint,
        }

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Return the number of rows; all are in one shard."""
        return (self.num_records,)

    def shard_name(self, shard: int) -> str:
        """Return the source's name."""
        return self._name

    @property
    def fetches_many(self) -> bool:
        """Return whether rows are plain Python data."""
        return self._dataset.format["type"] is None

    def start_epoch(self, epoch: int) -> None:
        """Do nothing: a dataset is the same in every epoch."""

    def fetch(self, shard: int, rows: Sequence[int]) -> Sequence[Record]:
        """Return these rows."""
        if not self.fetches_many:
            return [self._dataset[row] for row in rows]
        columns: dict[str, list[Any]] = self._dataset[rows if isinstance(rows, range) else list(rows)]
        names = list(columns)
        return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def open(self, epoch: int, cursor: Cursor | None) -> IndexedReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`. The cursor is the next row.

        Raises:
            ResumeError: The cursor is not a row of this dataset.
        """
        return IndexedReader(self, epoch, cursor)


class HuggingFaceStream:
    """The records of a `datasets.IterableDataset` in its order of the epoch; record ids are (name, running number).

    The dataset given is never changed: each pass reads a copy of its steps. Where the dataset's state resumes exactly, the cursor
    holds it and resuming reads at most one span again. Behind `.shuffle(buffer_size=...)`, whose state does not hold the buffer, the
    cursor counts records and resuming reads again from the beginning of the epoch; the loader's own shuffle does not need that.

    Args:
        dataset: A `datasets.IterableDataset`.
        name: The shard part of the record ids; by default what the dataset says of itself.
    """

    def __init__(self, dataset: Any, name: str | None = None) -> None:
        self._dataset = dataset
        self._name = name or _name_of(dataset)

    def __repr__(self) -> str:
        return f"HuggingFaceStream({self._name!r}, num_shards={self.num_shards})"

    @property
    def num_shards(self) -> int:
        """Return the number of shards that the dataset is made of."""
        return int(self._dataset.num_shards)

    @property
    def resumes_exactly(self) -> bool:
        """Return whether the state of every step of the dataset leads to the very next record."""
        return _version() >= EXACT_SINCE and all(map(_is_exact, _steps(self._dataset._ex_iterable)))

    def fingerprint(self) -> Mapping[str, Json]:
        """Return the name, the shards, the features and the steps of the dataset."""
        features = self._dataset.features
        return {
            "kind": "huggingface_stream",
            "name": self._name,
            "num_shards": self.num_shards,
            "features": None if features is None else str(features),
            "steps": [type(step).__name__ for step in _steps(self._dataset._ex_iterable)],
        }

    def open(self, epoch: int, cursor: Cursor | None) -> StreamReader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`.

        Raises:
            ResumeError: The cursor does not belong to a stream.
        """
        return StreamReader(self._name, partial(self._begin, epoch), cursor)

    def _begin(self, epoch: int, state: Json | None) -> Upstream:
        _refuse_data_loader_worker()
        dataset = _private_copy(self._dataset, epoch)
        if state is not None:
            dataset.load_state_dict(state)
        records: Iterator[Record] = iter(dataset)
        snapshot = partial(_plain_state, dataset) if self.resumes_exactly else None
        return Upstream(iterator=records, snapshot=snapshot, close=getattr(records, "close", None))


def _private_copy(dataset: Any, epoch: int) -> Any:
    """Return a dataset that shares functions and data with `dataset`, but neither its epoch nor its place.

    `copy.copy` would share the attributes as well, and a deep copy would duplicate data and tokenizers.
    """
    twin = object.__new__(type(dataset))
    twin.__dict__.update(vars(dataset))
    twin._ex_iterable = _private_step(dataset._ex_iterable)
    twin._epoch = epoch
    twin._starting_state_dict = None
    return twin


def _private_step(step: Any) -> Any:
    """Return a copy of a step and of the steps before it, which is where a dataset keeps its place."""
    twin = copy.copy(step)
    for key, value in vars(step).items():
        if _is_step(value):
            setattr(twin, key, _private_step(value))
        elif isinstance(value, list) and value and all(map(_is_step, value)):
            setattr(twin, key, [_private_step(entry) for entry in value])
    return twin


def _steps(step: Any) -> Iterator[Any]:
    """Yield a step and all steps before it."""
    yield step
    for value in vars(step).values():
        for entry in value if isinstance(value, list) else [value]:
            if _is_step(entry):
                yield from _steps(entry)


def _is_exact(step: Any) -> bool:
    """Return whether the state of a step leads to the very next record; `datasets` itself excepts batched maps over tables."""
    maps_tables = getattr(step, "batched", False) and getattr(getattr(step, "formatting", None), "is_table", False)
    return type(step).__name__ in EXACT_STEPS and not maps_tables


def _is_step(value: object) -> bool:
    return hasattr(value, "_init_state_dict") and hasattr(value, "shard_data_sources")


def _plain_state(dataset: Any) -> Json:
    """Return the dataset's state with Python values for NumPy's, of which the state of a mixture is made."""
    return _plain(dataset.state_dict())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    to_python: Callable[[], Any] | None = getattr(value, "tolist", None)
    return value if to_python is None else to_python()


def _name_of(dataset: Any) -> str:
    """Return "dataset/split" as far as the dataset knows them."""
    parts = [dataset.info.dataset_name or "huggingface", dataset.split]
    return "/".join(str(part) for part in parts if part is not None)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in sys.modules["datasets"].__version__.split(".")[:2])


def _refuse_data_loader_worker() -> None:
    """Refuse to read where `datasets` would silently keep only the shards of one DataLoader worker."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and torch_data.get_worker_info() is not None:
        raise ConfigError(
            "HuggingFaceStream",
            expected="to be read outside of DataLoader workers",
            got="a read inside of one",
            do="use num_workers=0 there, the loader has workers of its own",
        )
