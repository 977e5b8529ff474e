"""Parquet files as a source; `tests/sources/conformance.py` is what every source keeps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from aioloader import FixedBatch, Loader
from aioloader.errors import ConfigError, SourceError
from aioloader.sources.parquet import BATCH_ROWS, ParquetFiles
from tests.sources.conformance import check_foreign_cursors, check_source, read_all, run

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

RECORDS: list[dict[str, Any]] = [{"text": f"row {number}", "n": number} for number in range(23)]


def write(path: Path, records: list[dict[str, Any]], rows_per_group: int = 4) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=rows_per_group)
    return path


def test_rows_keep_the_contract_over_row_groups_and_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", RECORDS[:10])
    write(tmp_path / "b.parquet", RECORDS[10:])
    run(check_source(ParquetFiles(tmp_path), RECORDS, other=ParquetFiles(tmp_path)))
    run(check_foreign_cursors(ParquetFiles(tmp_path)))


def test_a_loader_reads_it_by_its_path(tmp_path: Path) -> None:
    records = [{"number": number} for number in range(10)]
    write(tmp_path / "a.parquet", records)
    with Loader(tmp_path, batch=FixedBatch(4), collate=lambda rows: {"rows": rows}, workers=0) as loader:
        assert [row for batch in loader for row in batch["rows"]] == records[:8]


def test_ids_count_the_rows_of_a_file_and_columns_are_chosen(tmp_path: Path) -> None:
    source = ParquetFiles(write(tmp_path / "a.parquet", RECORDS), columns=["text"])
    found = run(read_all(source, sizes=(5,)))
    assert found == [(("a.parquet", number), {"text": f"row {number}"}) for number in range(23)]


def test_a_place_inside_a_large_row_group_is_found_again(tmp_path: Path) -> None:
    records = [{"n": number} for number in range(3 * BATCH_ROWS)]
    source = ParquetFiles(write(tmp_path / "a.parquet", records, rows_per_group=len(records)))
    for row in (1, BATCH_ROWS - 1, BATCH_ROWS, 2 * BATCH_ROWS + 7):
        assert [record for _, record in run(read_all(source, cursor=[0, 0, row], sizes=(100,)))] == records[row:]


@pytest.mark.parametrize(
    ("columns", "match"), [(["body"], "expected columns of .*: text, n, got body"), (["text", "m"], "got m; name one of them")]
)
def test_a_column_that_is_not_there_is_refused(tmp_path: Path, columns: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ParquetFiles(write(tmp_path / "a.parquet", RECORDS), columns=columns)


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("not at all")
    with pytest.raises(ConfigError, match=r"expected Parquet files, got '.*a.parquet'"):
        ParquetFiles(tmp_path)


def test_a_file_that_went_away_fails_at_its_first_row(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", RECORDS[:4])
    gone = write(tmp_path / "b.parquet", RECORDS[4:])
    source = ParquetFiles(tmp_path)
    gone.unlink()
    reader = source.open(0, None)
    span = reader.read(100)
    assert span is not None
    assert span.records == RECORDS[:4]
    for _ in range(2):
        with pytest.raises(SourceError, match=r"record b.parquet\[0\]"):
            reader.read(1)
    reader.close()


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", RECORDS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"expected the library pyarrow, got none; pip install 'aioloader\[hf\]'"):
        ParquetFiles(tmp_path)
