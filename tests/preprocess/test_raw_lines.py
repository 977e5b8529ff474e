"""Lines as they are; `tests/sources/conformance.py` is what every source keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioloader.errors import SourceError
from aioloader.preprocess.limited import FirstRecords
from aioloader.preprocess.raw_lines import READ_BYTES, RawLines
from aioloader.sources import JsonLines, TextFiles
from aioloader.sources.listing import list_files
from tests.sources.conformance import check_foreign_cursors, check_source, read_all, run

LINES = [b'{"a": 1}', b"{", b"", b" x ", b"y\r", "é".encode(), b"last"]
EXPECTED = [b'{"a": 1}', b"{", b"x", b"y", "é".encode(), b"last"]


def lines_of(path: Path) -> RawLines:
    return RawLines(list_files("test", path, patterns=("*",)))


@pytest.fixture
def two(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(LINES))
    (tmp_path / "in" / "b.jsonl").write_bytes(b"")
    (tmp_path / "in" / "c.jsonl").write_bytes(b"one\ntwo\n\n")
    return tmp_path / "in"


def test_lines_keep_the_contract(two: Path) -> None:
    run(check_source(lines_of(two), [*EXPECTED, b"one", b"two"], other=lines_of(two)))
    run(check_foreign_cursors(lines_of(two)))


def test_ids_count_lines_as_the_source_of_json_does(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    parsed = run(read_all(JsonLines(tmp_path)))
    assert [place for place, _ in run(read_all(lines_of(tmp_path)))] == [place for place, _ in parsed] == [("a.jsonl", 0), ("a.jsonl", 2)]


def test_lines_longer_than_a_read_are_whole(tmp_path: Path) -> None:
    long = [b"a" * (3 * READ_BYTES), b"b", b"c" * READ_BYTES]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(long))
    assert [record for _, record in run(read_all(lines_of(tmp_path)))] == long


@pytest.mark.parametrize("more", [b"\nmore\nand more\n", b"er\nmore"])
def test_what_is_appended_later_is_not_read(tmp_path: Path, more: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"one\nlong")
    source = lines_of(tmp_path)
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write(more)
    assert [record for _, record in run(read_all(source))] == [b"one", b"long"]


def test_a_file_that_shrank_fails_behind_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"one\ntwo\n")
    source = lines_of(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(b"one\n")
    reader = source.open(0, None)
    span = reader.read(5)
    assert span is not None
    assert span.records == [b"one"]
    for _ in range(2):
        with pytest.raises(SourceError, match=r"record a.jsonl\[1\]: .*expected 4 more bytes, got the end"):
            reader.read(5)
    reader.close()


@pytest.mark.parametrize("number", [1, 4, 8])
def test_the_first_records_keep_the_contract(two: Path, number: int) -> None:
    """Of blocking sources and of asynchronous ones."""
    run(check_source(FirstRecords(lines_of(two), number), [*EXPECTED, b"one", b"two"][:number]))
    run(check_foreign_cursors(FirstRecords(lines_of(two), number)))
    texts = [{"text": (two / name).read_text("utf-8-sig"), "path": name} for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    (two / "a.jsonl").write_bytes(b"one\r\n")
    texts[0]["text"] = "one\r\n"
    run(check_source(FirstRecords(TextFiles(two), number), texts[:number]))
