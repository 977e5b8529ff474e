"""Where a stream stands: the next record to deliver, how to get there again, and what ended it. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from aioloader.errors import ConfigError, ResumeError, SourceError
from aioloader.protocols import Cursor, Json, RecordId, Span
from aioloader.sequences import RowIds
from aioloader.sources.pull import Pulled, source_error

__all__ = ["StreamPlace", "checked_state", "cursor_error", "number_records"]


class StreamPlace:
    """The place of a stream that is read from its beginning, or from a state that it gave itself.

    The next record is number `count` of the pass. It is reached from `state` (None: the beginning) by skipping `skip` records.

    Raises:
        ResumeError: `cursor` is not of a stream.
    """

    __slots__ = ("count", "ended", "failure", "name", "skip", "state")

    def __init__(self, name: str, cursor: Cursor | None) -> None:
        self.name = name
        self.count = 0
        self.state: Json | None = None
        self.skip = 0
        self.ended = False
        self.failure: BaseException | None = None
        if cursor is not None:
            self._load(cursor)

    @property
    def record(self) -> RecordId:
        """Return the id of the next record."""
        return (self.name, self.count)

    @property
    def is_live(self) -> bool:
        """Return whether the upstream is to be asked for more."""
        return self.failure is None and not self.ended

    def settle(self, pulled: Pulled) -> Span | None:
        """Return the span of what was pulled; where there is none, raise the failure or return None for the end.

        What came with records and ended them is kept for the next call.
        """
        first = self.count
        self.count += len(pulled.records)
        self.skip += len(pulled.records)
        self.ended = pulled.ended
        if pulled.failure is not None:
            self.failure = source_error(pulled.failure, self.record)
        if pulled.records:
            return Span(pulled.records, number_records(self.name, first, self.count))
        self.finish()
        return None

    def finish(self) -> None:
        """Raise the failure that ended this stream, if it was one, at every call alike."""
        if self.failure is not None:
            raise self.failure

    def interrupt(self) -> None:
        """Note that a read was cut short: the upstream may have lost records and must not be read on."""
        self.failure = SourceError("expected to read on, got a stream whose last read was interrupted; open it again", record=self.record)

    def remember(self, state: Json) -> None:
        """Note the state with which the upstream goes on at the next record."""
        self.state = state
        self.skip = 0

    def cursor(self) -> Cursor:
        """Return the cursor of the next record."""
        return {"count": self.count, "state": self.state, "skip": self.skip, "end": self.ended}

    def _load(self, cursor: Cursor) -> None:
        match cursor:
            case {"count": int(count), "state": state, "skip": int(skip), "end": bool(end), **rest} if not rest and 0 <= skip <= count:
                self.count, self.state, self.skip, self.ended = count, state, skip, end
            case _:
                raise cursor_error(self.name, cursor, "count, state, skip and end of a stream")


def number_records(name: str, first: int, stop: int) -> Sequence[RecordId]:
    """Return the ids of records `first` to `stop - 1` of one shard."""
    return RowIds(name, range(first, stop))


def cursor_error(name: str, cursor: Cursor, expected: str) -> ResumeError:
    """Return the error for a cursor that some other source made."""
    return ResumeError([(f"cursor of source {name}", cursor, expected)], do="load the state into a loader of the same source")


def checked_state(where: str, state: Json) -> Json:
    """Return a copy of `state`, which later changes of the original do not reach.

    Raises:
        ConfigError: `state` is None or would come back from JSON as something else.
    """
    try:
        copy = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise _not_json(where, str(error)) from error
    if state is None or not _same(copy, state):
        raise _not_json(where, repr(state)[:200])
    return copy


def _same(copy: Json, state: Json) -> bool:
    """Return whether JSON kept values and types; a tuple, or a number as a key, comes back as something else."""
    if type(copy) is not type(state):
        return False
    if isinstance(copy, dict):
        return copy.keys() == state.keys() and all(_same(value, state[key]) for key, value in copy.items())
    if isinstance(copy, list):
        return len(copy) == len(state) and all(map(_same, copy, state))
    return bool(copy == state)


def _not_json(where: str, got: str) -> ConfigError:
    return ConfigError(
        f"{where}.state_dict()",
        expected="a state of dicts with str keys, lists, strings, numbers, bools and None inside",
        got=got,
        do="return such a state (a list instead of a tuple or an array), or do not offer state_dict",
    )
