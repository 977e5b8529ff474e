from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.errors import ConfigError, ResumeError, SourceError
from aioloader.tokens.documents import DocumentOffsets
from aioloader.tokens.megatron import MegatronTokens
from aioloader.tokens.reading import TokenFile
from aioloader.tokens.writing import Position, TokenWriter, documents_path, open_writer
from tests.tokens.token_cases import FORMATS, SIZE_LIMIT, contents, target, write_tokens

SEQ_LEN = 7


def opened(format: str, path: Path, seq_len: int | None, position: Position | None = None) -> TokenWriter:
    return open_writer(format, path, dtype="uint16", seq_len=seq_len, position=position, size_limit=SIZE_LIMIT)


def append_spans(writer: TokenWriter, tokens: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], borders: list[int]) -> None:
    """Append tokens in pieces cut at `borders`, with the document ends of each piece."""
    for start, stop in pairwise(borders):
        writer.append(tokens[start:stop], ends[(ends > start) & (ends <= stop)] - start)


@pytest.mark.parametrize(("format", "seq_len"), [*((format, SEQ_LEN) for format in FORMATS), ("npy", None), ("pt", None), ("bin", None)])
@settings(max_examples=12)
@given(data=st.data())
def test_files_are_the_same_however_appended_and_interrupted(format: str, seq_len: int | None, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(0, 400))
    tokens = np.random.default_rng(num_tokens).integers(0, 65_536, num_tokens)
    cuts = st.lists(st.integers(0, num_tokens), max_size=8).map(sorted)
    ends = np.array(data.draw(cuts.map(lambda found: sorted(set(found) - {0}))), dtype=np.int64)
    borders = [0, *data.draw(cuts), num_tokens]
    stops = sorted({place % len(borders) for place in data.draw(st.lists(st.integers(0, 20), max_size=3))})
    goes_on_after_close = data.draw(st.booleans())

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        whole = write_tokens(format, target(Path(first), format), tokens, seq_len=seq_len, ends=ends)
        path = target(Path(second), format)
        writer, done = opened(format, path, seq_len), 0
        for stop in stops:
            append_spans(writer, tokens, ends, borders[done : stop + 1])
            position = json.loads(json.dumps(writer.flush()))
            # What a killed run did after its last saved position: more tokens, even an end.
            writer.append(np.arange(300), [5, 200])
            writer.flush()
            if goes_on_after_close:
                writer.close()
            writer.release()
            writer, done = opened(format, path, seq_len, position), stop
        append_spans(writer, tokens, ends, borders[done:])
        written = writer.close()
        assert contents(Path(second)) == contents(Path(first))
        counts = (written.num_tokens, written.num_rows, written.num_documents, written.dropped_tail)
        assert counts == (whole.num_tokens, whole.num_rows, whole.num_documents, whole.dropped_tail)


@pytest.mark.parametrize("format", ["npy", "pt", "bin"])
def test_what_is_written_is_read_and_the_tail_is_left_out(tmp_path: Path, format: str) -> None:
    # C007: shape [total // S, S], the length of the tail reported
    path = target(tmp_path, format)
    written = write_tokens(format, path, np.arange(30), seq_len=SEQ_LEN, ends=[3, 10, 29])
    assert (written.num_tokens, written.num_rows, written.num_documents, written.dropped_tail) == (28, 4, 3, 2)
    assert [file.name for file in written.files] == [path.name, documents_path(format, path).name]
    file = TokenFile(path)
    assert file.array.reshape(-1).tolist() == list(range(28))
    assert file.shape == ((28,) if format == "bin" else (4, 7))
    lengths = MegatronTokens(path) if format == "bin" else DocumentOffsets(documents_path(format, path))
    assert [lengths.length(document) for document in range(len(lengths))] == [3, 7, 18]


def test_rows_and_flat_pieces_go_to_one_stream(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    writer = open_writer("npy", path, dtype="int32", seq_len=3, size_limit=SIZE_LIMIT)
    writer.append(np.arange(2))
    writer.append(np.arange(2, 8).reshape(2, 3))
    writer.append(np.arange(8, 9))
    assert writer.close() == writer.close()
    stored = np.load(path)
    assert stored.dtype == np.int32
    assert stored.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_document_end_may_come_with_the_next_piece(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    writer = open_writer("npy", path, dtype="uint16", seq_len=None)
    writer.append(np.array([1, 2]))
    writer.append(np.array([3]), [0, 1])
    writer.append(np.array([4]))
    writer.close()
    assert np.load(tmp_path / "tokens.documents.npy").tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_appended_gives_empty_files(tmp_path: Path, format: str) -> None:
    path = target(tmp_path, format)
    written = write_tokens(format, path, [], seq_len=SEQ_LEN)
    assert (written.num_tokens, written.num_rows, written.num_documents) == (0, 0, 0)
    if format != "mds":
        assert TokenFile(path).array.size == 0


@pytest.mark.parametrize("ends", [[2, 2], [3, 1], [0], [9], [-1], [[1]]])
def test_refuses_document_ends_out_of_order_or_place(tmp_path: Path, ends: list[Any]) -> None:
    writer = open_writer("npy", tmp_path / "tokens.npy", dtype="uint16", seq_len=None)
    writer.append(np.array([1, 2, 3]), [3])
    with pytest.raises(ConfigError, match=r"append\(document_ends\): expected rising offsets above 0 and up to 4, got "):
        writer.append(np.array([1, 2, 3, 4]), ends)
    writer.release()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros((2, 3), int), r"expected tokens of shape \[n\] or \[rows, 7\], got shape \[2, 3\]"),
        (np.zeros((1, 1, 7), int), r"got shape \[1, 1, 7\]"),
        (np.array(3), r"got shape \[\]"),
        (np.array([70_000]), "expected token ids from 0 to 65535 .*got 70000"),
        (np.array([0.5]), "expected integer tokens"),
    ],
)
def test_refuses_tokens_of_another_shape_or_size(tmp_path: Path, tokens: np.ndarray[Any, Any], message: str) -> None:
    writer = opened("npy", tmp_path / "tokens.npy", SEQ_LEN)
    with pytest.raises(ConfigError, match=f"append: .*{message}"):
        writer.append(tokens)
    writer.append(np.arange(7))
    assert writer.close().num_rows == 1


@pytest.mark.parametrize(
    ("format", "name", "arguments", "message"),
    [
        ("csv", "t.csv", {}, r"open_writer\(format\): expected one of bin, mds, npy, pt, got 'csv'"),
        ("npy", "t.pt", {}, r"open_writer\(path\): expected a name that ends in \.npy"),
        ("mds", "t", {"seq_len": None}, r"open_writer\('mds', seq_len\): expected the length of a row, got None"),
        ("npy", "t.npy", {"seq_len": 0}, r"open_writer\(seq_len\): expected an int of at least 1, or None, got 0"),
        ("npy", "t.npy", {"seq_len": True}, r"open_writer\(seq_len\): .*got True"),
        ("npy", "t.npy", {"dtype": "float32"}, r"open_writer\('npy', dtype\): expected an integer dtype, got float32"),
        ("bin", "t.bin", {"dtype": "uint32"}, r"open_writer\('bin', dtype\): .*got uint32; use token_dtype\(vocab_size, 'bin'\)"),
        ("mds", "t", {"seq_len": 10_000, "size_limit": 500}, r"open_writer\('mds', size_limit\): expected a size between one row"),
        ("mds", "t", {"size_limit": 1 << 32}, r"open_writer\('mds', size_limit\)"),
    ],
)
def test_refuses_wrong_arguments(tmp_path: Path, format: str, name: str, arguments: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"dtype": "uint16", "seq_len": SEQ_LEN}
    with pytest.raises(ConfigError, match=message):
        open_writer(format, tmp_path / name, **(defaults | arguments))


def test_refuses_a_position_of_other_arguments(tmp_path: Path) -> None:
    writer = opened("npy", tmp_path / "tokens.npy", SEQ_LEN)
    position = writer.flush()
    writer.release()
    with pytest.raises(ResumeError, match=r"(?s)open_writer\(.*seq_len: expected 8, got 7.*open it with the same arguments"):
        opened("npy", tmp_path / "tokens.npy", 8, position)


@pytest.mark.parametrize("format", FORMATS)
def test_refuses_a_position_whose_files_lost_data(tmp_path: Path, format: str) -> None:
    path = target(tmp_path, format)
    writer = opened(format, path, SEQ_LEN)
    writer.append(np.arange(SEQ_LEN))
    position = writer.flush()
    writer.release()
    data = path / "shard.00000.mds" if format == "mds" else path
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(SourceError, match=f"{data.name}: expected at least the .* bytes of the saved position"):
        opened(format, path, SEQ_LEN, position)


def test_a_position_names_the_length_of_each_file(tmp_path: Path) -> None:
    for format in FORMATS:
        path = target(tmp_path / format, format)
        path.parent.mkdir()
        writer = opened(format, path, SEQ_LEN)
        writer.append(np.arange(40), [13, 20])
        files = writer.flush()["files"]
        where = path if format == "mds" else path.parent
        assert files == {name: (where / name).stat().st_size for name in files}
        assert len(files) == 2
        writer.release()
