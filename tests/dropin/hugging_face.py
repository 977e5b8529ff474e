"""Hugging Face `datasets` for tests: no network, nothing left in anybody's cache."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import tests.adapters.conftest  # noqa: F401 - sets the environment that `datasets` reads when it is imported

datasets: Any = pytest.importorskip("datasets")
pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # its thread outlives every progress bar


def write_json_lines(directory: Path, rows: Iterable[dict[str, Any]], name: str = "data.jsonl") -> str:
    path = directory / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def streamed(*paths: str) -> Any:
    """Return the stream of some JSONL files, one shard each."""
    return datasets.load_dataset("json", data_files={"train": list(paths)}, split="train", streaming=True)
