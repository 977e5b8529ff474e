from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from aioloader.errors import SourceError
from aioloader.tokens.metadata import Metadata, Part, file_facts, metadata_path, read_metadata, verify, write_metadata
from tests.tokens.token_cases import target, write_tokens


def write_data_set(directory: Path, format: str = "npy") -> Metadata:
    path = target(directory, format)
    written = write_tokens(format, path, np.arange(30), seq_len=7, ends=[10, 30])
    root = path if format == "mds" else directory
    metadata = Metadata(
        format=format,
        dtype="uint16",
        seq_len=7,
        parts=(Part.of("." if format == "mds" else path.name, written),),
        files=file_facts(root, written.files),
        tokenizer={"name": "bytes", "hash": "abc", "adds_bos": False},
        vocab_size=256,
        eos_id=0,
        packing="concat",
        source={"files": ["a.jsonl"]},
        details={"anything": [1, 2]},
    )
    write_metadata(path, metadata)
    return metadata


@pytest.mark.parametrize("format", ["npy", "pt", "bin", "mds"])
def test_metadata_come_back_and_data_are_verified(tmp_path: Path, format: str) -> None:
    metadata = write_data_set(tmp_path, format)
    path = target(tmp_path, format)
    assert read_metadata(path) == read_metadata(metadata_path(path)) == verify(path) == metadata
    assert (metadata.shape, metadata.num_tokens, metadata.num_documents, metadata.dropped_tail) == ((4, 7), 28, 2, 2)
    assert len(metadata.files) == (3 if format == "mds" else 2)


def test_the_file_says_what_people_look_for(tmp_path: Path) -> None:
    write_data_set(tmp_path)
    value = json.loads((tmp_path / "metadata.json").read_text())
    assert (value["schema_version"], value["shape"], value["num_documents"], value["dropped_tail"]) == (1, [4, 7], 2, 2)
    data = (tmp_path / "tokens.npy").read_bytes()
    assert value["files"]["tokens.npy"] == {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metadata.json", "tokens.documents.npy", "tokens.npy"]


def test_a_flat_stream_of_several_parts(tmp_path: Path) -> None:
    parts = tuple(Part(name=f"{n}.npy", num_tokens=n, num_rows=None, num_documents=1, dropped_tail=0) for n in (3, 4))
    metadata = Metadata(format="npy", dtype="int32", seq_len=None, parts=parts, files={})
    write_metadata(tmp_path, metadata)
    assert read_metadata(tmp_path / "3.npy") == metadata
    assert metadata.shape == (7,)


def test_verify_names_the_file_and_both_values(tmp_path: Path) -> None:
    metadata = write_data_set(tmp_path)
    path = tmp_path / "tokens.npy"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\xff")
    digest = metadata.files["tokens.npy"].sha256
    with pytest.raises(SourceError, match=rf"tokens\.npy: expected SHA-256 {digest}, got [0-9a-f]{{64}}; copy it again"):
        verify(tmp_path)
    path.write_bytes(data[:-1])
    with pytest.raises(SourceError, match=rf"tokens\.npy: expected bytes {len(data)}, got {len(data) - 1}; copy it again"):
        verify(tmp_path)
    path.unlink()
    with pytest.raises(SourceError, match=rf"tokens\.npy: expected {len(data)} bytes, got no such file"):
        verify(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "expected schema version 1, got 2; read it with the version that wrote it"),
        ({"parts": [{"name": "a"}]}, "expected the metadata of token files, got TypeError"),
        ({"files": {"a": 3}}, "got TypeError"),
        ({"files": {"../secret": {"num_bytes": 1, "sha256": ""}}}, "got TypeError: a file name that leads out of the directory"),
        ({"files": {"/etc/passwd": {"num_bytes": 1, "sha256": ""}}}, "leads out of the directory"),
    ],
)
def test_refuses_damaged_metadata(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_data_set(tmp_path)
    path = tmp_path / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SourceError, match=rf"metadata\.json: .*{message}"):
        read_metadata(tmp_path)


def test_refuses_missing_or_broken_metadata(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"metadata\.json: expected the metadata of .*, got no such file"):
        read_metadata(tmp_path)
    for text in ("{", "[]", "\xff"):
        (tmp_path / "metadata.json").write_text(text, encoding="latin-1")
        with pytest.raises(SourceError, match=r"metadata\.json: expected (the metadata of token files|schema version 1), got "):
            read_metadata(tmp_path)
