"""What the proof of value trains on, and the functions that travel to its workers. Without torch, so that workers start without it."""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aioloader.batching import Message, join_messages
from stdlib_corpus import END_OF_TEXT, open_tokenizer, stdlib_files

DOCUMENTED = ("bisect", "difflib", "fractions", "heapq", "json", "random", "shutil", "statistics", "string", "textwrap", "tokenize")
NUM_IMAGES = 48
SIDE, CROP = 16, 12
SPAN = 48
"""Tokens of a module or docstring that a sample of the mixture has at most."""


def small_modules() -> list[Path]:
    """Return modules of the standard library that are read and tokenized in an instant."""
    return [path for path in stdlib_files() if 2_000 < path.stat().st_size < 12_000][:64]


@dataclass(frozen=True, slots=True)
class Paragraphs:
    """Makes a sample of each paragraph of a module: documents of very different lengths."""

    tokenizer: str

    def __call__(self, record: dict[str, str]) -> list[dict[str, Any]]:
        tokenizer = open_tokenizer(self.tokenizer)
        return [{"input_ids": tokenizer.encode(text + END_OF_TEXT).ids} for text in record["text"].split("\n\n")]


@dataclass(frozen=True, slots=True)
class Chat:
    """Tokenizes a dialogue; one without an answer teaches nothing and is left out."""

    tokenizer: str

    def __call__(self, record: dict[str, Any]) -> Any:
        tokenizer = open_tokenizer(self.tokenizer)

        def message(turn: dict[str, str]) -> Message:
            opening, content, closing = (tokenizer.encode(text).ids for text in (turn["role"] + "\n", turn["content"], END_OF_TEXT))
            return Message(turn["role"], content, opening=opening, closing=closing)

        messages = [message(turn) for turn in record["messages"]]
        return join_messages(messages) if any(message.role == "assistant" for message in messages) else None


@dataclass(frozen=True, slots=True)
class RandomSpan:
    """Tokenizes a text and keeps a span of it, another one in each epoch."""

    tokenizer: str

    def __call__(self, record: dict[str, str]) -> dict[str, Any]:
        tokens = open_tokenizer(self.tokenizer).encode(record["text"]).ids
        length = random.randint(SPAN // 2, SPAN)
        first = random.randrange(max(1, len(tokens) - length))
        return {"input_ids": tokens[first : first + length]}


def augment(record: dict[str, Any]) -> dict[str, Any]:
    """Load an image, crop it, flip it and change its brightness, all at random."""
    image = np.load(record["path"])
    top, left = random.randint(0, SIDE - CROP), random.randint(0, SIDE - CROP)
    image = image[top : top + CROP, left : left + CROP].astype(np.float32)
    if np.random.random() < 0.5:
        image = image[:, ::-1]
    return {"image": np.ascontiguousarray(image)[None] / 128 - 1 + np.float32(np.random.normal(0, 0.1)), "label": record["label"]}


def write_data(directory: Path) -> None:
    """Write what comes from no package: docstrings as prose and as dialogues, and drawn images."""
    found = list(_functions())
    prose = [{"text": text} for _, text in found if text]
    chats = [{"messages": list(_turns(name, text))} for name, text in found]
    for file, records in (("prose.jsonl", prose), ("chats.jsonl", chats)):
        (directory / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    for number in range(NUM_IMAGES):
        np.save(directory / f"image{number:02}.npy", _draw(number))


def images(directory: Path) -> list[dict[str, Any]]:
    """Return a record per image: upright bars (0) or lying ones (1)."""
    return [{"path": str(directory / f"image{number:02}.npy"), "label": number % 2} for number in range(NUM_IMAGES)]


def _functions() -> Iterator[tuple[str, str]]:
    """Return name and docstring of public functions, some without."""
    for module_name in DOCUMENTED:
        module = importlib.import_module(module_name)
        for name, value in sorted(vars(module).items()):
            if inspect.isfunction(value) and value.__module__ == module_name:
                yield f"{module_name}.{name}", inspect.cleandoc(value.__doc__ or "")


def _turns(name: str, text: str) -> Iterator[dict[str, str]]:
    yield {"role": "user", "content": f"What does {name} do?"}
    for number, paragraph in enumerate(text.split("\n\n")[:2] if text else []):
        if number:
            yield {"role": "user", "content": "And more precisely?"}
        yield {"role": "assistant", "content": paragraph}


def _draw(number: int) -> Any:
    """Return bars on noise, lying or upright."""
    generator = np.random.default_rng(number)
    bars = np.arange(SIDE) // generator.integers(2, 4) % 2 * 150
    return (bars[:, None] if number % 2 else bars[None]).astype(np.uint8) + generator.integers(0, 100, (SIDE, SIDE), np.uint8)
