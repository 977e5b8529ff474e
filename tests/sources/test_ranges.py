from __future__ import annotations

from pathlib import Path

import anyio
from hypothesis import given
from hypothesis import strategies as st

from aioloader.sources import ranges
from aioloader.sources.listing import FileList, list_files
from aioloader.sources.ranges import ByteRange, fetch, plan_blocks


@given(sizes=st.lists(st.integers(0, 5 * 2**20), min_size=1, max_size=5), data=st.data())
def test_blocks_cover_what_follows_a_place_once_and_in_order(sizes: list[int], data: st.DataObject) -> None:
    files = FileList(paths=("",) * len(sizes), names=("",) * len(sizes), sizes=tuple(sizes))
    file = data.draw(st.integers(0, len(sizes) - 1))
    offset = data.draw(st.integers(0, sizes[file]))
    at = dict.fromkeys(range(file + 1, len(sizes)), 0) | {file: offset}
    previous = file
    for block in plan_blocks(files, file, offset):
        assert block.file >= previous
        assert block.start == at[block.file] < block.stop <= block.start + ranges.BLOCK_BYTES
        assert block.is_last == (block.stop == sizes[block.file])
        at[block.file], previous = block.stop, block.file
    assert at == {index: sizes[index] for index in range(file, len(sizes))}


async def test_fetch_returns_bytes_or_what_kept_them_away_in_order(tmp_path: Path) -> None:
    for name, text in (("a", "0123456789"), ("b", "short"), ("c", "gone")):
        (tmp_path / name).write_text(text)
    files = list_files("here", tmp_path, patterns=("*",))
    (tmp_path / "c").unlink()
    (tmp_path / "b").write_text("shor")
    wanted = [ByteRange(0, 2, 5, False), ByteRange(1, 1, 5, True), ByteRange(0, 5, 10, True), ByteRange(2, 0, 4, True)]
    first, shrunk, second, gone = await fetch(files, wanted)
    assert (first, second) == (b"234", b"56789")
    assert isinstance(shrunk, EOFError)
    assert "expected 5 bytes, got 4; the file shrank" in str(shrunk)
    assert isinstance(gone, FileNotFoundError)


async def test_a_cancelled_fetch_leaves_no_open_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    files = list_files("here", tmp_path, patterns=("*",))
    for _ in range(20):
        with anyio.move_on_after(0) as scope:
            await fetch(files, [ByteRange(0, 0, 1000, True)] * 8)
        assert scope.cancelled_caught


async def test_other_failures_are_kept_in_their_place_too() -> None:
    files = FileList(paths=("a\0b",), names=("a",), sizes=(3,))
    (failure,) = await fetch(files, [ByteRange(0, 0, 3, True)])
    assert isinstance(failure, ValueError)
