"""What decides the output, and whether it is the same as that of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aioloader.errors import ConfigError
from aioloader.preprocess.directory import OutputDirectory
from aioloader.preprocess.inputs import Part, open_parts
from aioloader.preprocess.options import PreprocessOptions
from aioloader.preprocess.tokenizer import Tokens, open_tokens
from aioloader.protocols import Json
from aioloader.state.fingerprint import require_json
from aioloader.state.schema import differences

__all__ = ["PreprocessPlan", "make_plan", "refuse_differences"]

_SETTINGS = ("format", "packing", "seq_len", "text_field", "special_tokens_in_text", "per_input", "limit")


@dataclass(frozen=True, slots=True)
class PreprocessPlan:
    """The options, with what they name opened.

    Attributes:
        directory: Where the output goes.
        config: All that decides the bytes of the output: settings, tokenizer and inputs; not the number of workers.
    """

    options: PreprocessOptions
    directory: OutputDirectory
    parts: tuple[Part, ...]
    tokens: Tokens
    config: Mapping[str, Json]


def make_plan(options: PreprocessOptions) -> PreprocessPlan:
    """Return the plan.

    Raises:
        ConfigError: An input or the tokenizer is missing or cannot be read.
    """
    num_parts = len(options.inputs) if options.per_input else None
    directory = OutputDirectory(options.output, format=options.format, num_parts=num_parts)
    parts = tuple(open_parts(options, directory))
    tokens = open_tokens(options)
    inputs = {str(number): dict(part.fingerprint()) for number, part in enumerate(parts)}
    settings: dict[str, Any] = {name: getattr(options, name) for name in _SETTINGS}
    config = require_json({**settings, **tokens.settings(), "inputs": inputs}, where="preprocess")
    return PreprocessPlan(options, directory, parts, tokens, config)


def refuse_differences(where: str, saved: Json, config: Json) -> None:
    """Refuse to go on with, or to use, what other settings or other data made.

    Raises:
        ConfigError: They differ; lists how.
    """
    found = differences(saved, config)
    if found:
        lines = "".join(f"\n  {name}: {_short(before)} then, {_short(now)} now" for name, before, now in found)
        raise ConfigError(
            where,
            expected="the settings and inputs of the run that wrote it",
            got=f"others{lines}\n",
            do="use --overwrite, or another output",
        )


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
