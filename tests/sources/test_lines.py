from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from aioloader.sources.lines import LineCutter

TEXT = st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\xc3\xa9", b"bcd"]), max_size=30).map(b"".join)


@given(text=TEXT, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_lines_do_not_depend_on_the_blocks(text: bytes, cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    blocks = [text[start:stop] for start, stop in pairwise(borders)]
    cutter = LineCutter()
    lines: list[tuple[bytes, int]] = []
    for number, block in enumerate(blocks, start=1):
        cutter.feed(block, is_last=number == len(blocks))
        while (line := cutter.take_line()) is not None:
            lines.append(line)
    assert [line for line, _ in lines] == (text.split(b"\n")[:-1] if text.endswith(b"\n") or not text else text.split(b"\n"))
    assert sum(num_bytes for _, num_bytes in lines) == len(text)


def test_a_line_is_given_only_when_it_is_complete() -> None:
    cutter = LineCutter()
    cutter.feed(b"one", is_last=False)
    assert cutter.take_line() is None
    assert not cutter.has_lines
    cutter.feed(b" line\nnext", is_last=False)
    assert cutter.has_lines
    assert cutter.take_line() == (b"one line", 9)
    assert cutter.take_line() is None
    cutter.feed(b"", is_last=True)
    assert cutter.take_line() == (b"next", 4)
