"""Real data that every machine has: the source code of Python's standard library, and a tokenizer trained on it."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["END_OF_TEXT", "Tokenize", "stdlib_files", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"


def stdlib_files() -> list[Path]:
    """Return the modules of the standard library, about 30 MB, in a mixed order that is always the same."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    random.Random(0).shuffle(files)
    return files


def train_tokenizer(files: list[Path], *, vocab_size: int, save_to: Path) -> None:
    """Train a byte-level BPE on `files` and write it as one JSON file; the same files give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((path.read_text(errors="replace") for path in files), trainer)
    save_to.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(save_to))


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Turns a record of `TextFiles` into `{"input_ids": [...]}` that ends with the end-of-text token.

    It holds only a path: each worker process opens the tokenizer for itself, once.
    """

    path: str

    def __call__(self, record: dict[str, str]) -> dict[str, list[int]]:
        """Return the sample of one record."""
        return {"input_ids": open_tokenizer(self.path).encode(record["text"] + END_OF_TEXT).ids}


@lru_cache(maxsize=1)
def open_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer, from memory after the first call of a process."""
    return Tokenizer.from_file(path)
