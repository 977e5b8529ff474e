"""Workloads on real data: a tokenizer on the source text of Python's standard library, and JPEG decoding.

`prepare_*` make the data once, under a cache folder; the classes read them from there.
"""

from __future__ import annotations

import functools
import io
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.benchmarks.work import Array, Sample, Stacked

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Jpegs", "Texts", "prepare_jpegs", "prepare_texts"]

_NUM_JPEGS = 64
_JPEG_SIZE = (500, 375)  # the usual size of a photograph in ImageNet


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """3 KB of text for each record, tokenized by a byte-level BPE; the batch is padded with zeros to its longest row."""

    num_records: int
    batch_size: int
    folder: str
    text_bytes: int = 3000
    window: int = 2048
    is_large: bool = False

    def record(self, index: int) -> str:
        corpus = _corpus(self.folder)
        first = index * self.text_bytes % (len(corpus) - self.text_bytes)
        return corpus[first : first + self.text_bytes]

    def sample(self, record: str) -> Sample:
        return {"input_ids": np.array(_tokenizer(self.folder).encode(record).ids, dtype=np.int64)}

    def collate(self, samples: Sequence[Sample]) -> dict[str, Array]:
        rows = [sample["input_ids"] for sample in samples]
        padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for place, row in enumerate(rows):
            padded[place, : len(row)] = row
        return {"input_ids": padded}


@dataclass(frozen=True, slots=True, kw_only=True)
class Jpegs(Stacked):
    """A JPEG file read, decoded and resized to `uint8[224, 224, 3]`."""

    folder: str
    window: int = 512
    is_large: bool = True

    def record(self, index: int) -> bytes:
        return (Path(self.folder) / f"{index % _NUM_JPEGS:03}.jpg").read_bytes()

    def sample(self, record: bytes) -> Sample:
        from PIL import Image

        with Image.open(io.BytesIO(record)) as image:
            small = image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)
        return {"pixels": np.array(small)}


def prepare_texts(folder: Path, *, num_bytes: int = 6_000_000, vocabulary: int = 16_000) -> None:
    """Write the corpus and train the tokenizer, unless they are there."""
    corpus_path, tokenizer_path = folder / "corpus.txt", folder / "tokenizer.json"
    if corpus_path.exists() and tokenizer_path.exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    corpus_path.write_text(_stdlib_text(num_bytes), encoding="ascii")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train([str(corpus_path)], trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(tokenizer_path))


def prepare_jpegs(folder: Path) -> None:
    """Write the images, unless they are there: coloured gradients, edges and some grain, the same on every machine."""
    if (folder / f"{_NUM_JPEGS - 1:03}.jpg").exists():
        return
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(_NUM_JPEGS):
        coarse = rng.integers(0, 256, size=(12, 16, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize(_JPEG_SIZE, Image.Resampling.BICUBIC), dtype=np.int16)
        grain = rng.normal(0, 8, size=smooth.shape).astype(np.int16)
        pixels = np.clip(smooth + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.jpg", quality=90)


def _stdlib_text(num_bytes: int) -> str:
    """Return the first modules of the standard library, as ASCII, so that characters are bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return text.encode("ascii", errors="replace").decode()[:num_bytes]


@functools.cache
def _corpus(folder: str) -> str:
    return (Path(folder) / "corpus.txt").read_text(encoding="ascii")


@functools.cache
def _tokenizer(folder: str) -> tokenizers.Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time: its threads would only be a hazard after a fork
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
