"""Streams of Hugging Face under a loader: faults that people reported of others, by their number in `test_contract_coverage.py`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from aioloader import FixedBatch, Loader, Shuffle
from tests.contract.cases import collate, numbers

datasets = pytest.importorskip("datasets")
pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # its thread outlives every progress bar


def make(source: Any, batch_size: int = 1, **options: Any) -> Loader:
    return Loader(source, preprocess=lambda row: row["id"], batch=FixedBatch(batch_size), collate=collate, workers=0, **options)


def test_a_mapped_stream_resumes_at_the_next_record(tmp_path: Path) -> None:
    """K04: and not where the next chunk of the file begins."""
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(3000)))

    def stream() -> Any:
        files = {"train": str(path)}
        return datasets.load_dataset("json", data_files=files, split="train", streaming=True).map(lambda row: row)

    with make(stream(), 10) as loader:
        iterator = iter(loader)
        first = numbers(itertools.islice(iterator, 13))
        state = json.dumps(iterator.state())
        iterator.close()
    with make(stream(), 10) as loader:
        loader.load_state_dict(json.loads(state))
        rest = numbers(loader)
    assert rest[:3] == [130, 131, 132]
    assert first + rest == list(range(3000))


@pytest.mark.parametrize(("first", "stop"), [(12, None), (0, 12)])
def test_a_part_of_a_stream_is_the_same_part_in_the_second_pass(first: int, stop: int | None) -> None:
    """K19: shuffled, and twice."""
    stream = datasets.Dataset.from_dict({"id": list(range(30))}).to_iterable_dataset(num_shards=3)
    part = stream.skip(first) if stop is None else stream.take(stop)
    with make(part, shuffle=Shuffle(window=16, seed=5)) as loader:
        passes = [numbers(loader) for _ in range(2)]
    assert [sorted(one) for one in passes] == [list(range(30)[first:stop])] * 2
    assert passes[0] != passes[1]
