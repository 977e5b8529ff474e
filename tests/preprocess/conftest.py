"""A real tokenizer, trained once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preprocess.cases import train

pytest.importorskip("tokenizers")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
