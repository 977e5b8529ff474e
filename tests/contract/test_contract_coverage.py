"""Which test shows what: faults reported against comparable loaders (K), and what is owed by an asynchronous preprocessing stage (A), a
loader (B), data-parallel training (C) and loading by index (D).

Every row has a test, or a reason why it has none. The rows are in the modules `coverage_*`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

from tests.contract import coverage_batches, coverage_datasets, coverage_engine, coverage_order, coverage_training
from tests.contract.cases import ROOT
from tests.contract.coverage_row import Later, NotApplicable, Row

TABLES: tuple[dict[str, Row], ...] = (
    coverage_engine.ROWS,
    coverage_order.ROWS,
    coverage_batches.ROWS,
    coverage_training.ROWS,
    coverage_datasets.ROWS,
)
WHOLE = {"A": range(1, 76), "C": range(1, 64), "D": range(1, 23), "K": (*range(1, 58), *range(65, 80))}
"""Of these, no row is left out."""


def defined_in(path: str) -> set[str]:
    """Return the names of the test functions that a file defines, or nothing if there is no such file."""
    file = ROOT / path
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")}


def missing(tests: Iterable[str]) -> set[str]:
    """Return which node ids (`path::function`) name no test."""
    named = set(tests)
    defined = {path: defined_in(path) for path in {test.partition("::")[0] for test in named}}
    return {test for test in named if test.partition("::")[2] not in defined[test.partition("::")[0]]}


def test_every_row_is_listed_once_and_shown_or_has_a_reason() -> None:
    assert [name for name, count in Counter(name for table in TABLES for name in table).items() if count > 1] == []
    assert [name for table in TABLES for name, row in table.items() if not (row.right and row.shown_by and all(row.shown_by))] == []


def test_no_row_is_missing() -> None:
    listed = {name for table in TABLES for name in table}
    assert {f"{kind}{number:0{2 if kind == 'K' else 3}}" for kind, numbers in WHOLE.items() for number in numbers} - listed == set()


def test_every_test_named_here_exists() -> None:
    shown_by = [row.shown_by for table in TABLES for row in table.values()]
    assert missing(test for tests in shown_by if not isinstance(tests, NotApplicable | Later) for test in tests) == set()


def test_a_test_that_does_not_exist_is_found() -> None:
    wrong = {"tests/contract/test_contract_coverage.py::test_of_nothing", "tests/test_of_nothing.py::test_every_row"}
    assert missing([*wrong, "tests/contract/test_contract_coverage.py::test_every_test_named_here_exists"]) == wrong
