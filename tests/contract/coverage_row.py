"""What a row of the table of coverage is; see `test_contract_coverage.py`."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CONFIGURATION", "Later", "NotApplicable", "Row", "shown"]


class NotApplicable(NamedTuple):
    """The row does not fit this loader."""

    reason: str


class Later(NamedTuple):
    """The row belongs to a part that does not exist yet."""

    part: str
    reason: str


class Row(NamedTuple):
    """What is right, in a few words, and what shows it: node ids of tests (`path::function`), or why there are none."""

    right: str
    shown_by: tuple[str, ...] | NotApplicable | Later


def shown(right: str, *tests: str) -> Row:
    """Return a row that tests show."""
    return Row(right, tests)


CONFIGURATION = Later("configuration of the originals", "an adapter is to read their files; Loader takes arguments only")
