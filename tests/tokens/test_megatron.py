from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from struct import pack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader import FixedBatch, Loader, PretrainCollator
from aioloader.errors import ConfigError, SourceError
from aioloader.tokens.megatron import MegatronTokens
from aioloader.tokens.megatron_index import index_header
from tests.tokens.token_cases import write_tokens


def write_index(
    path: Path, lengths: list[int], documents: list[int], *, pointers: list[int] | None = None, modes: bytes = b"", dtype: str = "<u2"
) -> None:
    """Write an index by hand, as builders of other data than text do: several sequences in a document, and modes."""
    places = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize if pointers is None else pointers
    header = index_header(np.dtype(dtype), len(lengths), len(documents) - 1)
    arrays = [np.asarray(lengths, "<i4"), np.asarray(places, "<i8"), np.asarray(documents, "<i8")]
    path.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays) + modes)
    if pointers is None:
        path.with_suffix(".bin").write_bytes(np.arange(sum(lengths)).astype(dtype).tobytes())


@pytest.fixture
def multimodal(tmp_path: Path) -> Path:
    """Write 4 sequences (the third is empty) in 3 documents (the second is empty), with modes."""
    write_index(tmp_path / "a", [3, 4, 0, 2], [0, 2, 2, 4], modes=b"\x01\x00\x02\x01")
    return tmp_path / "a"


def test_lengths_and_counts_are_known_without_the_tokens(tmp_path: Path) -> None:
    # B040: num_tokens, length(i) without reading data
    write_tokens("bin", tmp_path / "a.bin", np.arange(60), ends=[7, 20, 60])
    data = MegatronTokens(tmp_path / "a.bin")
    (tmp_path / "a.bin").unlink()
    assert (len(data), data.num_documents, data.num_tokens) == (3, 3, 60)
    assert [data.length(0), data.length(np.int64(1)), data.length(-1)] == [7, 13, 40]
    with pytest.raises(ConfigError, match=r"a\.bin: expected a token file, got no such file"):
        data[0]


def test_sequences_documents_and_modes(multimodal: Path) -> None:
    data = MegatronTokens(multimodal)
    assert [data[place].tolist() for place in range(4)] == [[0, 1, 2], [3, 4, 5, 6], [], [7, 8]]
    assert [data.document(place).tolist() for place in range(3)] == [[0, 1, 2, 3, 4, 5, 6], [], [7, 8]]
    assert data.modes is not None
    assert data.modes.tolist() == [1, 0, 2, 1]
    assert [data.read(1, 1).tolist(), data.read(1, 1, 3).tolist(), data.read(1, 2, 99).tolist(), data.read(1, 3, 1).tolist()] == [
        [4, 5, 6],
        [4, 5],
        [5, 6],
        [],
    ]


def test_text_has_no_modes(tmp_path: Path) -> None:
    write_tokens("bin", tmp_path / "a.bin", np.arange(6), ends=[2, 6])
    assert MegatronTokens(tmp_path / "a").modes is None


def test_seeks_tokens_past_empty_sequences_and_documents(multimodal: Path) -> None:
    data = MegatronTokens(multimodal)
    assert [data.seek_tokens(place) for place in (0, 2, 3, 6, 7, 8, 9)] == [(0, 0), (0, 2), (0, 3), (0, 6), (2, 0), (2, 1), (3, 0)]
    with pytest.raises(IndexError, match=r"expected an index from -9 to 8, got 10; it has 9 entries"):
        data.seek_tokens(10)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30), data=st.data())
def test_seek_tokens_lands_on_the_token(lengths: list[int], data: st.DataObject) -> None:
    # B042
    with tempfile.TemporaryDirectory() as directory:
        write_tokens("bin", Path(directory, "a.bin"), np.arange(sum(lengths)), ends=np.cumsum(lengths))
        tokens = MegatronTokens(Path(directory, "a.bin"))
        place = data.draw(st.integers(0, sum(lengths) - 1))
        document, offset = tokens.seek_tokens(place)
        assert tokens.document(document)[offset] == place


def test_is_sent_as_its_path_and_mapped_where_it_is_used(tmp_path: Path) -> None:
    write_tokens("bin", tmp_path / "a.bin", np.arange(60_000), ends=[7, 60_000])
    data = MegatronTokens(str(tmp_path / "a.idx"))
    assert data[0].tolist() == list(range(7))
    sent = pickle.dumps(data)
    assert len(sent) < 300
    assert pickle.loads(sent)[1].size == 59_993
    data[0][:] = 1  # a copy
    assert data[0].tolist() == list(range(7))


@pytest.mark.parametrize("index", [3, -4])
def test_refuses_an_index_out_of_range(tmp_path: Path, index: int) -> None:
    write_tokens("bin", tmp_path / "a.bin", np.arange(6), ends=[1, 2, 6])
    data = MegatronTokens(tmp_path / "a.bin")
    for ask in (data.length, data.read, data.document):
        with pytest.raises(IndexError, match=rf"MegatronTokens\(.*expected an index from -3 to 2, got {index}; it has 3 entries"):
            ask(index)
    with pytest.raises(TypeError, match="str"):
        data["0"]  # type: ignore[index]


def test_refuses_tokens_and_index_that_do_not_belong_together(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_tokens("bin", path, np.arange(6), ends=[1, 2, 6])
    whole = path.read_bytes()
    for damaged in (whole[:-2], whole + b"\x00"):
        path.write_bytes(damaged)
        with pytest.raises(SourceError, match=rf"a\.bin: expected 12 bytes as a\.idx says, got {len(damaged)}; it was cut short or"):
            MegatronTokens(path)
    write_index(tmp_path / "a", [2, 4], [0, 1])
    with pytest.raises(SourceError, match=r"a\.idx: expected document boundaries up to 2 sequences, got 1"):
        MegatronTokens(path)


@pytest.mark.parametrize(("length", "pointer"), [(2, 1), (2, -4), (-1, 2), (9, 2)])
def test_refuses_a_sequence_outside_the_tokens(tmp_path: Path, length: int, pointer: int) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(12))
    write_index(tmp_path / "a", [length, 2], [0, 1, 2], pointers=[pointer, 8])
    data = MegatronTokens(tmp_path / "a.bin")
    assert data[1].tolist() == [0, 0]
    with pytest.raises(SourceError, match=rf"a\.idx: expected sequence 0 inside the 6 tokens, got {length} from byte {pointer} on"):
        data[0]


def test_a_data_set_without_a_sequence(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / "a.idx").write_bytes(index_header(np.dtype("<u2"), 0, 0) + pack("<q", 0))
    data = MegatronTokens(tmp_path / "a")
    assert (len(data), data.num_documents, data.num_tokens, data.seek_tokens(0)) == (0, 0, 0, (0, 0))


def test_is_a_source_of_a_loader_with_worker_processes(tmp_path: Path) -> None:
    write_tokens("bin", tmp_path / "a.bin", np.arange(100), ends=np.arange(5, 101, 5))
    loader = Loader(MegatronTokens(tmp_path / "a.bin"), batch=FixedBatch(4), collate=PretrainCollator(), workers=2)
    with loader:
        rows = [row for batch in loader for row in batch["input_ids"].tolist()]
    assert rows == np.arange(100).reshape(20, 5).tolist()


def test_documents_that_lead_out_of_the_index_are_refused(tmp_path: Path) -> None:
    write_index(tmp_path / "a", [3, 4], [0, 7, 2])
    data = MegatronTokens(tmp_path / "a")
    with pytest.raises(SourceError, match=r"a\.idx: expected document 0 inside the 2 sequences, got sequences 0 to 7; copy both files"):
        data.document(0)
    write_index(tmp_path / "b", [3, 4], [1, 7, 2])
    with pytest.raises(SourceError, match=r"b\.idx: expected rising places and documents, got document -1 for sequence 0"):
        MegatronTokens(tmp_path / "b").seek_tokens(1)
