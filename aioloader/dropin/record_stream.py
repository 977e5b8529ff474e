"""Passes over a source in the caller's thread, one record at a time, with the state as of the last record handed out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from aioloader.dropin.dealing import is_indexed, part_of_worker
from aioloader.dropin.epoch import SharedEpoch
from aioloader.dropin.outer_worker import outer_worker, warn_of_unknown_batches
from aioloader.errors import ClosedError, ResumeError
from aioloader.options import check_int
from aioloader.protocols import Cursor, Json, Reader, Record, Source
from aioloader.state.fingerprint import require_json

__all__ = ["RecordIterator", "RecordStream", "check_outer_batch_size", "checked_state", "part_here"]

_VERSION = 1
_READ_AHEAD = 64
"""Records of an indexed source that are read at once. Of a stream one is: who leaves the loop finds the rest where it was."""
_NOTE_EVERY = 1024
"""Records of a stream between two cursors, each of which can cost a copy of its state; so many are read again at most."""


class RecordStream:
    """What the datasets of records have in common: passes, state, epoch, and the part of a DataLoader worker.

    Args:
        name: The dataset, for messages.
        source: All its records.
        outer_batch_size: Of the DataLoader around it, None if it is not known.
    """

    def __init__(self, name: str, source: Source, outer_batch_size: Any) -> None:
        self.source = source
        self.epoch = SharedEpoch()
        self._name = name
        self._outer_batch_size = check_outer_batch_size(name, outer_batch_size)
        self._loaded: dict[str, Any] | None = None
        self._pass: _Pass | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a DataLoader worker without the pass that runs here."""
        return {**self.__dict__, "_pass": None}

    def start(self) -> RecordIterator:
        """Start a pass at the loaded state, or else at the beginning of the epoch; an earlier iterator ends.

        In a DataLoader worker the pass gives the part of that worker.
        """
        worker = outer_worker()
        warn_of_unknown_batches(self._name, worker, self._outer_batch_size)
        loaded, self._loaded = self._current(), None
        if self._pass is not None:
            self._pass.close()
        epoch = self.epoch.get()
        if loaded is None or (loaded["ended"] and not worker.is_worker):
            self._pass = _Pass(self._part(), epoch, None, 0, ended=False)
        else:
            self._pass = _Pass(self._part(), epoch, loaded["cursor"], loaded["skip"], ended=loaded["ended"])
        return RecordIterator(self._pass)

    def state(self) -> Json:
        """Return the state as of the last record handed out."""
        loaded = self._current()
        if loaded is not None:
            return loaded
        place = {"epoch": self.epoch.get(), "cursor": None, "skip": 0, "ended": False} if self._pass is None else self._pass.place()
        return {"version": _VERSION, "kind": "records", "of": self._fingerprint(), **place}

    def load(self, state: Json) -> None:
        """Load a state for the next pass; a pass that runs ends.

        Raises:
            ResumeError: It is of other records, or of another part of them.
        """
        loaded = checked_state(self._name, state, "records", ("of", "epoch", "cursor", "skip", "ended"))
        saved, present = loaded["of"], self._fingerprint()
        if saved != present:
            raise ResumeError(
                [(key, saved.get(key), value) for key, value in present.items() if saved.get(key) != value],
                do="load it into the same dataset on the same rank, in the same DataLoader worker of as many",
                where=f"{self._name}.load_state_dict",
            )
        if self._pass is not None:
            self._pass.close()
        self.epoch.set(loaded["epoch"])
        self._loaded = loaded

    def _current(self) -> dict[str, Any] | None:
        """Return the loaded state, unless another epoch was set since."""
        return self._loaded if self._loaded is not None and self._loaded["epoch"] == self.epoch.get() else None

    def _part(self) -> Source:
        return part_here(self.source, self._outer_batch_size)

    def _fingerprint(self) -> Json:
        return require_json(dict(self._part().fingerprint()), where=f"{self._name}.state_dict")


class RecordIterator:
    """The records of one pass. Ends with the pass, when a newer one starts, or when it is no longer referenced."""

    def __init__(self, run: _Pass) -> None:
        self._pass = run

    def __iter__(self) -> RecordIterator:
        """Return the iterator itself."""
        return self

    def __next__(self) -> Record:
        """Return the next record.

        Raises:
            SourceError: The dataset failed; everything before was given. Raised again by every later call.
        """
        return self._pass.next()

    def close(self) -> None:
        """Close the dataset's iterator; safe to call twice."""
        self._pass.close()

    def __del__(self) -> None:
        """Close what was left early."""
        with contextlib.suppress(Exception):  # at interpreter exit parts of the module may be gone
            self.close()


class _Pass:
    """One pass over a part of the records; its place outlives the iterator."""

    def __init__(self, source: Source, epoch: int, cursor: Cursor | None, skip: int, *, ended: bool) -> None:
        self._source = source
        self._epoch = epoch
        self._reader: Reader | None = None
        self._noted = cursor
        self._num_since = 0
        self._to_skip = skip
        self._records: Sequence[Record] = ()
        self._next = 0
        self._over: Exception | None = StopIteration() if ended else None
        self._ended = ended
        self._owner_pid = os.getpid()
        self._read_ahead, self._note_every = (_READ_AHEAD, 1) if is_indexed(source) else (1, _NOTE_EVERY)

    def next(self) -> Record:
        """Return the next record."""
        while self._over is None:
            if self._next < len(self._records):
                record = self._records[self._next]
                self._next += 1
                self._num_since += 1
                return record
            try:
                self._read()
            except BaseException as error:
                self._leave(error if isinstance(error, Exception) else _interrupted(error))
                raise
        raise self._over

    def place(self) -> dict[str, Json]:
        """Return where the next record is."""
        cursor, skip = self._noted, self._num_since + self._to_skip
        if self._reader is not None and self._over is None and self._next == len(self._records) and not self._to_skip:
            exact = self._reader.cursor()
            cursor, skip = (cursor, skip) if exact is None else (exact, 0)
        return {"epoch": self._epoch, "cursor": cursor, "skip": skip, "ended": self._ended}

    def close(self) -> None:
        """Leave the pass."""
        self._leave(ClosedError("iterator: expected an open iterator, got one that was closed or replaced by a newer one; use that."))

    def _read(self) -> None:
        """Read on, and pass over what was handed out before a resume."""
        if self._reader is None:
            self._reader = self._source.open(self._epoch, self._noted)  # type: ignore[assignment]
        elif self._num_since >= self._note_every and (cursor := self._reader.cursor()) is not None:
            self._noted, self._num_since = cursor, 0
        self._records, self._next = (), 0
        span = self._reader.read(self._read_ahead)  # type: ignore[union-attr]
        if span is None:
            self._ended = True
            self._leave(StopIteration())
            return
        self._records = span.records
        self._next = min(self._to_skip, len(span.records))
        self._to_skip -= self._next
        self._num_since += self._next

    def _leave(self, reason: Exception) -> None:
        if self._over is not None:
            return
        self._over = reason
        self._records = ()
        if self._reader is not None and self._owner_pid == os.getpid():  # a copy in a forked process must not close the original
            self._reader.close()


def part_here(source: Source, outer_batch_size: int | None) -> Source:
    """Return the records of this DataLoader worker, all of them outside of one."""
    worker = outer_worker()
    return part_of_worker(source, worker.index, worker.count, outer_batch_size or 1)


def check_outer_batch_size(name: str, batch_size: Any) -> int | None:
    """Return the batch size if it is one, or None."""
    if batch_size is None:
        return None
    return check_int(f"{name}(outer_batch_size=)", batch_size, at_least=1, do="pass the batch_size of the DataLoader around it")


def checked_state(name: str, state: Json, kind: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return a state if it is one of this kind and version.

    Raises:
        ResumeError: It is something else.
    """
    got = sorted(state) if isinstance(state, dict) else type(state).__name__
    difference: tuple[str, object, object]
    if not isinstance(state, dict) or set(state) != {"version", "kind", *keys}:
        difference = ("entries", got, sorted(["version", "kind", *keys]))
    elif (state["version"], state["kind"]) != (_VERSION, kind):
        difference = ("version and kind", [state["version"], state["kind"]], [_VERSION, kind])
    else:
        return dict(state)
    raise ResumeError([difference], do="load what state_dict() of such a dataset returned", where=f"{name}.load_state_dict")


def _interrupted(error: BaseException) -> Exception:
    return ClosedError(
        f"iterator: expected one that was not interrupted, got one whose last read ended by {type(error).__name__}; start anew."
    )
