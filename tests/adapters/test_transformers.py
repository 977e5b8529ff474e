"""Tokenizers that travel to workers."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest

from aioloader.errors import ConfigError
from aioloader_adapters.transformers import open_tokenizer
from tests.preprocess.cases import EOS, train

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXT = "def naïve(x):\n    return '<|endoftext|>'"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def directory(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("directory")
    inner = tokenizers.Tokenizer.from_file(str(file))
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(path)
    return path


def test_a_file_and_a_directory_make_the_same_tokens(file: Path, directory: Path) -> None:
    one, other = open_tokenizer(str(file)), open_tokenizer(str(directory))
    assert one.start()(TEXT) == other.start()(TEXT)
    assert (one.eos_id, one.bos_id, one.vocab_size) == (other.eos_id, other.bos_id, other.vocab_size) == (EOS, None, 600)


def test_what_travels_makes_the_same_tokens_and_has_the_same_digest(file: Path) -> None:
    opened = open_tokenizer(str(file))
    moved = pickle.loads(pickle.dumps(opened))
    assert moved.digest == opened.digest == open_tokenizer(str(file)).digest
    assert moved.start()(TEXT) == opened.start()(TEXT)
    assert len(repr(moved)) < 300


def test_special_tokens_in_text_are_text_unless_asked(file: Path) -> None:
    assert EOS not in open_tokenizer(str(file)).start()(TEXT)
    assert open_tokenizer(str(file), special_tokens_in_text=True).start()(TEXT).count(EOS) == 1


def test_padding_and_truncation_of_the_file_are_left_out(file: Path, tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(file))
    inner.enable_truncation(3)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "cut.json"))
    assert open_tokenizer(str(tmp_path / "cut.json")).start()(TEXT) == open_tokenizer(str(file)).start()(TEXT)


def test_a_tokenizer_in_python_is_opened_by_name_in_each_worker(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "</s>": 3, "<unk>": 4}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b</w>\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>"}))
    opened = open_tokenizer(str(tmp_path))
    moved = pickle.loads(pickle.dumps(opened))
    assert type(opened).__name__ == "SlowTokenizer"
    assert moved.start()("a") == opened.start()("a") != []
    assert (moved.digest, moved.vocab_size, moved.token_id("</s>")) == (opened.digest, 5, 3)


def test_two_names_for_an_end_are_not_guessed_at(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1, "<|endoftext|>": 2}, unk_token="a"))
    inner.save(str(tmp_path / "two.json"))
    opened = open_tokenizer(str(tmp_path / "two.json"))
    assert opened.eos_id is None
    assert opened.token_id("</s>") == 1
    assert opened.token_id("never") is None


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("gone.json", None, "expected an existing file, got '.*gone.json'"),
        ("bad.json", "{}", r"expected a tokenizer.json of the tokenizers library, got '.*bad.json'"),
        ("nothing", None, r"expected a tokenizer.json file, or a path or name that transformers.AutoTokenizer opens"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, name: str, content: str | None, match: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=match):
        open_tokenizer(str(tmp_path / name))


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="opens without code of its own"):
        open_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("library", "name"), [("tokenizers", "a.json"), ("transformers", "a")])
def test_without_the_library_it_says_what_to_install(library: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"expected the library {library}, got none; pip install 'aioloader\[hf\]'"):
        open_tokenizer(name)
