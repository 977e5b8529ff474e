from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioloader.errors import SourceError
from aioloader.sources import JsonLines, json_lines, ranges
from tests.sources.conformance import check_failure, check_source, read_all, read_span, read_with_cursors, run

LINE = st.sampled_from(['{"a": 1}', '{"text": "é\U0001f600 long enough to cross"}', "", "  ", '{"none": null, "list": [1, {}]}'])
LAYOUT = st.tuples(st.sampled_from(["", "\ufeff"]), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "\n"]))


def write(directory: Path, **texts: str | bytes) -> JsonLines:
    for name, text in texts.items():
        directory.joinpath(f"{name}.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    return JsonLines(directory)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(st.lists(LINE, max_size=5), min_size=1, max_size=3), layout=LAYOUT, block=st.integers(1, 40))
def test_any_layout_gives_the_lines_that_are_not_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[list[str]], layout: tuple[str, str, str], block: int
) -> None:
    monkeypatch.setattr(ranges, "BLOCK_BYTES", block)
    mark, newline, final = layout
    for old in tmp_path.iterdir():
        old.unlink()
    source = write(tmp_path, **{f"f{number}": mark + newline.join(lines) + final for number, lines in enumerate(files)})
    expected = [
        ((f"f{number}.jsonl", line), json.loads(text))
        for number, lines in enumerate(files)
        for line, text in enumerate(lines)
        if text.strip()
    ]
    assert run(read_all(source)) == expected
    found, cursors = run(read_with_cursors(source))
    for before, cursor in cursors:
        assert run(read_all(source, cursor=cursor)) == found[before:]


async def test_lines_longer_than_a_fetch(tmp_path: Path) -> None:
    long = {"text": "é" * (3 << 20)}
    source = write(tmp_path, a=f'{{"a": 1}}\n{json.dumps(long, ensure_ascii=False)}\n{{"b": 2}}', b=json.dumps(long))
    await check_source(source, [{"a": 1}, long, {"b": 2}, long], sizes=(1,))


async def test_the_cursor_is_file_offset_and_line(tmp_path: Path) -> None:
    source = write(tmp_path, a='{"a": 1}\r\n\r\n{"a": 2}\n', b="", c='\n{"a": "é"}')
    _, cursors = await read_with_cursors(source)
    assert [cursor for _, cursor in cursors] == [[0, 0, 0], [0, 10, 1], [0, 21, 3], [2, 12, 2], [2, 12, 2]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "Expecting property name enclosed in double quotes at column 2"),
        ("[1, 2]", "a list"),
        ("null", "a NoneType"),
        ('{"a": 1} {"b": 2}', "Extra data at column 10"),
        (b'{"a": "\xff"}', "UnicodeDecodeError"),
        ("[" * 200_000, "RecursionError"),
    ],
)
async def test_a_line_that_is_no_object_fails_in_its_place(tmp_path: Path, line: str | bytes, reason: str) -> None:
    bad = line if isinstance(line, bytes) else line.encode()
    source = write(tmp_path, a='{"a": 0}\n', b=b'\n{"a": 1}\n{"a": 2}\n' + bad + b'\n{"a": 3}\n')
    where = rf"record b.jsonl\[3\]: .*b.jsonl, line 4: expected a JSON object, got {reason}.*; mend or remove the line"
    await check_failure(source, before=[{"a": 0}, {"a": 1}, {"a": 2}], match=where, kind=SourceError)


async def test_a_file_that_shrank_fails_after_its_complete_lines(tmp_path: Path) -> None:
    source = write(tmp_path, a='{"a": 0}\n', b='{"a": 1}\n{"a": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n')
    await check_failure(source, before=[{"a": 0}], match=r"record b.jsonl\[0\]: .*the file shrank", kind=SourceError)


async def test_what_is_appended_later_is_not_read(tmp_path: Path) -> None:
    source = write(tmp_path, a='{"a": 0}\n')
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"a": 1}\n')
    assert [record for _, record in await read_all(source)] == [{"a": 0}]


async def test_a_cancelled_read_loses_nothing(tmp_path: Path) -> None:
    source = write(tmp_path, a="".join(f'{{"a": {number}}}\n' for number in range(50)))
    reader = source.open(0, None)
    found: list[Any] = []
    with anyio.move_on_after(0):
        await read_span(reader, 10)
    while (span := await read_span(reader, 10)) is not None:
        found.extend(record["a"] for record in span.records)
    assert found == list(range(50))


def test_fetches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [ranges.ByteRange(number, 0, 10, True) for number in range(40)]
    plan = iter(small)
    assert [len(json_lines._some_of(plan)) for _ in range(4)] == [16, 16, 8, 0]
    large = [ranges.ByteRange(0, number << 20, (number + 1) << 20, False) for number in range(10)]
    plan = iter(large)
    assert [len(json_lines._some_of(plan)) for _ in range(4)] == [4, 4, 2, 0]


def test_facts(tmp_path: Path) -> None:
    source = write(tmp_path, a="{}")
    assert source.fingerprint()["kind"] == "json_lines"
    assert source.fingerprint()["files"] == [["a.jsonl", 2]]
    assert repr(source) == "JsonLines(1 files)"
