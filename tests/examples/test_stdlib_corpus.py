from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from stdlib_corpus import END_OF_TEXT, Tokenize, open_tokenizer, stdlib_files, train_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(stdlib_files()[:5], vocab_size=512, save_to=path)
    return path


def test_the_corpus_is_the_same_every_time_and_holds_no_installed_package() -> None:
    files = stdlib_files()
    assert files == stdlib_files()
    assert len(set(files)) == len(files) > 500
    assert not any("site-packages" in path.parts for path in files)


def test_the_same_files_give_the_same_tokenizer(saved: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    train_tokenizer(stdlib_files()[:5], vocab_size=512, save_to=again)
    assert again.read_bytes() == saved.read_bytes()


def test_a_sample_is_the_whole_text_and_an_end(saved: Path) -> None:
    text = "def café():\n\treturn '→'\n"
    ids = Tokenize(str(saved))({"text": text, "path": "cafe.py"})["input_ids"]
    tokenizer = open_tokenizer(str(saved))
    assert ids[-1] == tokenizer.token_to_id(END_OF_TEXT)
    assert tokenizer.decode(ids[:-1]) == text
    assert max(ids) < 512


def test_a_worker_gets_only_the_path(saved: Path) -> None:
    record = {"text": "x = 1", "path": "x.py"}
    sent = pickle.dumps(Tokenize(str(saved)))
    assert len(sent) < 500
    assert pickle.loads(sent)(record) == Tokenize(str(saved))(record)
