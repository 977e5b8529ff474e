from __future__ import annotations

from pathlib import Path

import pytest

from aioloader.errors import SourceError
from aioloader.tokens.append_file import AppendFile


def test_takes_up_a_file_at_a_length_and_restores_its_header(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = AppendFile(path, b"head")
    file.write(b"abc")
    assert file.sync() == 7
    file.write(b"garbage")
    file.replace_header(b"done")
    file.release()
    assert path.read_bytes() == b"doneabcgarbage"

    file = AppendFile(path, b"head", 3)
    file.write(b"d")
    assert file.read_data(1, 2) == b"bc"
    file.write(b"e")
    file.sync()
    file.release()
    file.release()
    assert path.read_bytes() == b"headabcde"


def test_without_a_length_an_existing_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"older and longer")
    file = AppendFile(path, b"h")
    file.release()
    assert path.read_bytes() == b"h"


@pytest.mark.parametrize("present", [None, b"head", b"headab"])
def test_refuses_a_file_that_lost_data(tmp_path: Path, present: bytes | None) -> None:
    path = tmp_path / "file"
    if present is not None:
        path.write_bytes(present)
    with pytest.raises(SourceError, match=f"file: expected at least the 7 bytes of the saved position, got {len(present or b'')}; remove"):
        AppendFile(path, b"head", 3)
