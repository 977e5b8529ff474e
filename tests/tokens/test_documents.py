from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aioloader.errors import ConfigError
from aioloader.tokens.documents import DocumentOffsets
from aioloader.tokens.writing import documents_path
from tests.tokens.token_cases import write_tokens


@pytest.fixture
def documents(tmp_path: Path) -> Iterator[DocumentOffsets]:
    write_tokens("pt", tmp_path / "a.pt", np.arange(20), seq_len=5, ends=[3, 4, 20])
    offsets = DocumentOffsets(documents_path("pt", tmp_path / "a.pt"))
    yield offsets
    offsets.close()


def test_lengths_and_spans(documents: DocumentOffsets) -> None:
    assert (len(documents), documents.num_tokens) == (3, 20)
    assert [documents.length(place) for place in (0, 1, -1)] == [3, 1, 16]
    assert documents.span(np.int32(2)) == (4, 20)


def test_seek_tokens(documents: DocumentOffsets) -> None:
    assert [documents.seek_tokens(place) for place in (0, 2, 3, 4, 19, 20)] == [(0, 0), (0, 2), (1, 0), (2, 0), (2, 15), (3, 0)]
    with pytest.raises(IndexError, match="expected an index from -20 to 19, got 21"):
        documents.seek_tokens(21)


def test_is_sent_as_its_path(documents: DocumentOffsets) -> None:
    assert documents.length(0) == 3
    copy = pickle.loads(pickle.dumps(documents))
    assert copy.span(1) == (3, 4)
    documents.close()
    assert documents.length(2) == 16


def test_refuses_what_is_no_file_of_offsets(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2), np.int64))
    with pytest.raises(ConfigError, match=r"a\.npy: expected offsets, int64\[documents \+ 1\], got int64\[2, 2\]"):
        DocumentOffsets(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.zeros(2, np.int32))
    with pytest.raises(ConfigError, match=r"got int32\[2\]; pass documents_path"):
        DocumentOffsets(tmp_path / "a.npy")
