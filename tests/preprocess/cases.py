"""Corpora, a tokenizer, and what a run of preprocessing left behind."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from aioloader.preprocess import Preprocessed, PreprocessOptions, preprocess
from stdlib_corpus import END_OF_TEXT, train_tokenizer

EOS = 0
"""The id of END_OF_TEXT: special tokens come first."""


def train(path: Path, vocab_size: int = 600) -> Path:
    stdlib = Path(sysconfig.get_path("stdlib"))
    train_tokenizer([stdlib / name for name in ("this.py", "bisect.py", "heapq.py")], vocab_size=vocab_size, save_to=path)
    return path


def documents(number: int) -> list[str]:
    """Texts of 1 to some 60 tokens, with letters outside of ASCII, newlines, and what reads like a special token."""
    words = ["def", "return", "naïve", "heap[0]", "\n", "if x:", END_OF_TEXT, "日本", "import", "self.value = None"]
    return [" ".join(words[(at * 7 + step * step) % 10] for step in range(1 + at * 13 % 20)) for at in range(number)]


def write_lines(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "n": at}) + "\n" for at, text in enumerate(texts)))
    return path


def encode(tokenizer: Path, text: str) -> list[int]:
    """What a document must become; special tokens in text are text."""
    opened = Tokenizer.from_file(str(tokenizer))
    opened.encode_special_tokens = True
    return [*opened.encode(text, add_special_tokens=False).ids, EOS]


def stream(tokenizer: Path, texts: Sequence[str]) -> list[int]:
    return [token for text in texts for token in encode(tokenizer, text)]


def options(source: Any, tokenizer: Path, output: Path, **chosen: Any) -> PreprocessOptions:
    inputs = tuple(map(str, source)) if isinstance(source, list) else (str(source),)
    defaults: dict[str, Any] = {"seq_len": 64, "workers": 0, "save_every_s": 0.0}
    if chosen.get("packing") == "none":
        del defaults["seq_len"]
    return PreprocessOptions(inputs=inputs, tokenizer=str(tokenizer), output=str(output), **{**defaults, **chosen})


def run(source: Any, tokenizer: Path, output: Path, **chosen: Any) -> Preprocessed:
    return preprocess(options(source, tokenizer, output, **chosen))


def tokens_of(output: Path, name: str = "tokens.npy") -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.load(output / name, allow_pickle=False)
    return array


def digests(output: Path) -> dict[str, str]:
    """The files that a run left, by content; the lock is empty."""
    files = (path for path in sorted(output.rglob("*")) if path.is_file() and path.name != ".lock")
    return {path.relative_to(output).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
