"""`align_dataset`: chat and instruction records, record by record, as the columns that LLaMA-Factory's preprocess functions expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.utils.data

from aioloader.dropin.alignment import BadRecordError, DatasetAttr, align_record, broken_record
from aioloader.dropin.dealing import as_source
from aioloader.dropin.record_stream import RecordIterator, RecordStream
from aioloader.errors import ConfigError, SourceError
from aioloader.options import check_choice
from aioloader.protocols import Cursor, Json, Reader, RecordId, Source, Span

__all__ = ["AlignedIterableDataset", "AlignedRecords", "DatasetAttr", "align_dataset", "check_bad_records"]


def align_dataset(
    dataset: Any, attr: DatasetAttr, *, bad_records: str = "raise", outer_batch_size: int | None = None
) -> AlignedIterableDataset:
    """Return a dataset of the aligned columns of the records of `dataset`, in their order; other columns are left out.

    Nothing is read here, and no record is used up to learn the columns: `attr` names them. `_prompt`, `_response`, `_system`, `_tools`,
    `_images`, `_videos` and `_audios` are as LLaMA-Factory makes them, see `aioloader.dropin.alignment`.

    Args:
        dataset: A Hugging Face `IterableDataset` (streaming) or `Dataset`, any iterable, or a function that returns one.
        attr: The format of the records.
        bad_records: What becomes of a record that is not of this format (a missing column, an unknown role, turns that are not in pairs).
            "raise": everything before it is given, then an error names it. "drop": it is left out. "empty": it becomes a record with
            empty `_prompt` and `_response`, for preprocess functions that drop such, as LLaMA-Factory's do.
        outer_batch_size: See `DistributedIterableDataset`.

    Raises:
        ConfigError: An argument is something else.
    """
    return AlignedIterableDataset(dataset, attr, bad_records=bad_records, outer_batch_size=outer_batch_size)


class AlignedIterableDataset(torch.utils.data.IterableDataset[dict[str, Any]]):
    """What `align_dataset` returns. State, epochs and DataLoader workers: as in `DistributedIterableDataset`."""

    aioloader_stage = "align"

    def __init__(self, dataset: Any, attr: DatasetAttr, *, bad_records: str = "raise", outer_batch_size: int | None = None) -> None:
        if not isinstance(attr, DatasetAttr):
            raise ConfigError(
                "align_dataset(attr=)", expected="a DatasetAttr", got=repr(attr), do="pass e.g. DatasetAttr(formatting='sharegpt')"
            )
        self.dataset = dataset
        source = AlignedRecords(as_source("align_dataset(dataset=)", dataset), attr, check_bad_records(bad_records))
        self._records = RecordStream("align_dataset", source, outer_batch_size)

    def record_source(self) -> Source:
        """Return the source of all records, for stages around this one."""
        return self._records.source

    def __iter__(self) -> RecordIterator:
        """Start a pass; see `RecordStream.start`."""
        return self._records.start()

    def state_dict(self) -> Json:
        """Return the state as of the last record handed out."""
        return self._records.state()

    def load_state_dict(self, state: Json) -> None:
        """Load a state for the next pass. Raises `ResumeError` if it is not of this dataset."""
        self._records.load(state)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next passes, also in persistent DataLoader workers (if forked); passed on to the dataset."""
        self._records.epoch.set(epoch)


def check_bad_records(bad_records: Any) -> str:
    """Return the argument if it is one of the choices."""
    return check_choice("align_dataset(bad_records=)", bad_records, ("raise", "drop", "empty"))


class AlignedRecords:
    """The aligned records of a source, under their ids there; one position each but for those that are left out."""

    def __init__(self, source: Source, attr: DatasetAttr, bad_records: str) -> None:
        self.source = source
        self.attr = attr
        self.bad_records = bad_records

    @property
    def is_one_to_one(self) -> bool:
        """Return whether each record of the source is one here, so that a part of the aligned ones is a part of the source aligned."""
        return self.bad_records != "drop"

    def over(self, source: Source) -> AlignedRecords:
        """Return the same alignment of another source."""
        return AlignedRecords(source, self.attr, self.bad_records)

    def fingerprint(self) -> Mapping[str, Json]:
        """Return that of the source, and the format."""
        attr = {name: getattr(self.attr, name) for name in self.attr.__dataclass_fields__ if name != "media_dir"}
        return {"kind": "aligned", "source": dict(self.source.fingerprint()), "bad_records": self.bad_records, **attr}

    def open(self, epoch: int, cursor: Cursor | None) -> Reader:
        """Return a reader of one pass; see `aioloader.protocols.Source.open`."""
        return _AlignedReader(self.source.open(epoch, cursor), self.attr, self.bad_records)  # type: ignore[arg-type]


class _AlignedReader:
    def __init__(self, reader: Reader, attr: DatasetAttr, bad_records: str) -> None:
        self._reader = reader
        self._attr = attr
        self._bad_records = bad_records
        self._failure: SourceError | None = None
        self.cursor = reader.cursor
        self.close = reader.close

    def read(self, max_records: int) -> Span | None:
        """Return the next records, aligned. Before one that is to raise, those before it are returned."""
        if self._failure is not None:
            raise self._failure
        span = self._reader.read(max_records)
        if span is None:
            return None
        records: list[Any] = []
        ids: list[RecordId] = []
        for record, record_id in zip(span.records, span.ids, strict=True):
            try:
                records.append(align_record(record, self._attr))
            except BadRecordError as error:
                if self._bad_records == "drop":
                    continue
                if self._bad_records == "raise":
                    self._failure = _failure(error, record_id)
                    if not records:
                        raise self._failure from error
                    break
                records.append(broken_record())
            ids.append(record_id)
        return Span(records, ids)


def _failure(error: BadRecordError, record_id: RecordId) -> SourceError:
    failure = SourceError(f"align_dataset: {error}; or choose bad_records='drop' or 'empty'", record=record_id)
    failure.__cause__ = error
    return failure
