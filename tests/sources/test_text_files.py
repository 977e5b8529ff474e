from __future__ import annotations

from pathlib import Path

import pytest

from aioloader.errors import ConfigError, SourceError
from aioloader.sources import TextFiles, ranges, text_files
from tests.sources.conformance import check_failure, read_all, read_span


async def test_text_is_kept_as_it_is_but_for_the_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "b.txt").write_bytes(b"")
    assert await read_all(TextFiles(tmp_path)) == [
        (("a.txt", 0), {"text": "one\r\ntwo\n", "path": "a.txt"}),
        (("b.txt", 0), {"text": "", "path": "b.txt"}),
    ]


async def test_other_encodings(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1"))
    ((_, record),) = await read_all(TextFiles(tmp_path, encoding="latin-1"))
    assert record["text"] == "é"
    ((_, record),) = await read_all(TextFiles(tmp_path, errors="replace"))
    assert record["text"] == "\N{REPLACEMENT CHARACTER}"
    assert TextFiles(tmp_path).fingerprint() != TextFiles(tmp_path, errors="replace").fingerprint()


async def test_bytes_in_another_encoding_fail_in_their_place(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(b"fine" if number != 3 else b"\xff")
    before = [{"text": "fine", "path": f"{number}.txt"} for number in range(3)]
    error = await check_failure(TextFiles(tmp_path), before=before, match=r"record 3.txt\[0\]: .* UnicodeDecodeError", kind=SourceError)
    assert isinstance(error.__cause__, UnicodeDecodeError)


async def test_a_file_that_went_away_fails_in_its_place(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("fine")
    source = TextFiles(tmp_path)
    (tmp_path / "1.txt").unlink()
    await check_failure(
        source, before=[{"text": "fine", "path": "0.txt"}], match=r"record 1.txt\[0\]: .* FileNotFoundError", kind=SourceError
    )


async def test_large_files_are_not_read_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "FETCH_BYTES", 10)
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("x" * (4 if number != 3 else 40))
    reader = TextFiles(tmp_path).open(0, None)
    sizes = []
    while (span := await read_span(reader, 100)) is not None:
        sizes.append(len(span.records))
    assert sizes == [2, 1, 1, 2]
    assert ranges.FETCH_RANGES == 16


def test_facts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    source = TextFiles([tmp_path / "a.txt"])
    assert source.num_records == 1
    assert source.fingerprint()["files"] == [["a.txt", 1]]
    assert repr(source) == "TextFiles(1 files)"


@pytest.mark.parametrize("options", [{"encoding": "klingon"}, {"errors": "shrug"}])
def test_unknown_options_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"TextFiles\(encoding=, errors=\): expected names that Python knows, got unknown"):
        TextFiles(tmp_path, **options)
