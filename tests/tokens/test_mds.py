from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from struct import unpack, unpack_from

import numpy as np
import numpy.typing as npt

from aioloader.tokens.writing import open_writer
from tests.tokens.token_cases import SIZE_LIMIT, write_tokens


def read_mds(path: Path) -> list[npt.NDArray[np.uint16]]:
    """Read the rows as Mosaic's reader does: by the index, and the offsets of each shard."""
    rows = []
    for shard in json.loads((path / "index.json").read_text())["shards"]:
        assert (shard["column_names"], shard["column_encodings"], shard["column_sizes"]) == (["tokens"], ["ndarray:uint16:7"], [14])
        data = (path / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"] <= SIZE_LIMIT
        assert hashlib.sha256(data).hexdigest() == shard["raw_data"]["hashes"]["sha256"]
        (num_samples,) = unpack_from("<I", data)
        assert num_samples == shard["samples"]
        offsets = unpack_from(f"<{num_samples + 1}I", data, 4)
        config = json.loads(data[4 + 4 * (num_samples + 1) : offsets[0]])
        assert config.items() <= shard.items()
        rows += [np.frombuffer(data[start:stop], "<u2") for start, stop in pairwise(offsets)]
    return rows


def test_rows_in_shards_and_documents_beside_them(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 65_536, 7 * 50 + 3)
    written = write_tokens("mds", tmp_path / "shards", tokens, seq_len=7, ends=[100, 353])
    rows = read_mds(tmp_path / "shards")
    assert np.array_equal(np.stack(rows), tokens[:350].reshape(50, 7))
    assert (written.num_rows, written.dropped_tail) == (50, 3)
    assert np.load(tmp_path / "shards" / "documents.npy").tolist() == [0, 100, 350]
    names = [path.name for path in written.files]
    assert names[-2:] == ["index.json", "documents.npy"]
    assert len(names) > 4
    assert sorted(names) == sorted(path.name for path in (tmp_path / "shards").iterdir())


def test_a_full_shard_has_the_bytes_of_the_format(tmp_path: Path) -> None:
    # Written by hand from the format: 1 row of 2 tokens in a shard; Mosaic's own writer gave the same bytes.
    config = (
        b'{"column_encodings": ["ndarray:uint16:2"], "column_names": ["tokens"], "column_sizes": [4], "compression": null, '
        b'"format": "mds", "hashes": ["sha256"], "size_limit": 201, "version": 2}'
    )
    writer = open_writer("mds", tmp_path / "shards", dtype="uint16", seq_len=2, size_limit=201)
    writer.append(np.array([[1, 2], [3, 4]]))
    writer.close()
    first = (tmp_path / "shards" / "shard.00000.mds").read_bytes()
    start = 12 + len(config)
    assert unpack("<3I", first[:12]) == (1, start, start + 4)
    assert first[12:] == config + b"\x01\x00\x02\x00"
    assert len(first) <= 201


def test_an_older_and_larger_run_leaves_nothing(tmp_path: Path) -> None:
    write_tokens("mds", tmp_path / "shards", np.arange(700), seq_len=7)
    write_tokens("mds", tmp_path / "shards", np.arange(14), seq_len=7)
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == ["documents.npy", "index.json", "shard.00000.mds"]
    assert len(read_mds(tmp_path / "shards")) == 2
