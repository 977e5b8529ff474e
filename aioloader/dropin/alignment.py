"""One record of a chat or instruction data set as the columns that preprocess functions of LLaMA-Factory expect. Pure.

    _prompt      the conversation before the answer: [{"role", "content"}, ...], an odd number of turns
    _response    the answer: one turn of the assistant or a function call; none where an Alpaca-style record has no response
    _system      the system prompt, "" if there is none
    _tools       the tools as JSON text, "" if there are none
    _images, _videos, _audios    lists, or None

Source: the public behaviour of `align_dataset` in LLaMA-Factory (`data/converter.py`), which MindSpeed-MM took over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aioloader.errors import AioLoaderError, ConfigError
from aioloader.options import check_choice

__all__ = ["BadRecordError", "DatasetAttr", "align_record", "broken_record"]

_MEDIA = ("images", "videos", "audios")


class BadRecordError(AioLoaderError, ValueError):
    """A record is not what its `DatasetAttr` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetAttr:
    """The format of a data set: which columns hold what, and the words for roles. None for a column that there is not.

    Attributes:
        formatting: "alpaca" (columns of text) or "sharegpt" (one column with a list of turns; the chat format of OpenAI is the same
            with `role_tag="role", content_tag="content", user_tag="user", assistant_tag="assistant"`).
        prompt: Alpaca: the instruction; `query`: its input, put below it; `response`: the answer; `history`: earlier pairs of both.
        messages: ShareGPT: the turns. A first turn of `system_tag` is the system prompt.
        system: The system prompt, for both; `tools`, `images`, `videos`, `audios` alike.
        role_tag: In a turn, the key of the role; `content_tag`: that of the text.
        user_tag: The role of the user; `assistant_tag`, `observation_tag` (a tool's result), `function_tag` (a call of it) and
            `system_tag` alike.
        media_dir: A folder that media paths are relative to, where the file exists there; others stay as they are.

    Raises:
        ConfigError: `formatting` is something else, or a name is no text.
    """

    formatting: str = "alpaca"
    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = None
    messages: str = "conversations"
    system: str | None = None
    tools: str | None = None
    images: str | None = None
    videos: str | None = None
    audios: str | None = None
    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"
    media_dir: str | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_choice("DatasetAttr(formatting=)", self.formatting, ("alpaca", "sharegpt"))
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            is_optional = self.__dataclass_fields__[name].type == "str | None"
            if not (isinstance(value, str) and value) and not (value is None and is_optional):
                expected = "a name, or None" if is_optional else "a name"
                raise ConfigError(f"DatasetAttr({name}=)", expected=expected, got=repr(value), do="give the name of the column or tag")


def align_record(record: Any, attr: DatasetAttr) -> dict[str, Any]:
    """Return the aligned columns of one record; the record is not changed.

    Raises:
        BadRecordError: A column is missing, a turn is malformed, has an unknown role or is out of turn, or the turns are not in pairs.
    """
    if not isinstance(record, Mapping):
        raise BadRecordError(f"expected a record that is a mapping, got {type(record).__name__}; give records with named columns")
    prompt, response, system = (_alpaca if attr.formatting == "alpaca" else _sharegpt)(record, attr)
    return {
        "_prompt": prompt,
        "_response": response,
        "_system": system,
        "_tools": _tools(_column(record, attr.tools)),
        **{f"_{kind}": _media(_column(record, getattr(attr, kind)), attr.media_dir) for kind in _MEDIA},
    }


def broken_record() -> dict[str, Any]:
    """Return what stands for a bad record where its preprocess function is to drop it: no prompt and no response."""
    return {"_prompt": [], "_response": [], "_system": "", "_tools": "", **{f"_{kind}": None for kind in _MEDIA}}


def _alpaca(record: Mapping[str, Any], attr: DatasetAttr) -> tuple[list[dict[str, str]], list[dict[str, str]], str]:
    prompt: list[dict[str, str]] = []
    for pair in _column(record, attr.history) or ():
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise BadRecordError(f"column {attr.history!r}: expected pairs of prompt and response, got {_brief(pair)}; mend the record")
        prompt += [_turn("user", pair[0]), _turn("assistant", pair[1])]
    parts = [_text(record, attr.prompt), _text(record, attr.query)]
    text = "\n".join(part for part in parts if part)
    if not text:
        raise BadRecordError(f"expected a prompt in column {attr.prompt!r} or {attr.query!r}, got none; mend or drop the record")
    answer = _column(record, attr.response)
    return [*prompt, _turn("user", text)], [] if answer is None else [_turn("assistant", answer)], _text(record, attr.system)


def _sharegpt(record: Mapping[str, Any], attr: DatasetAttr) -> tuple[list[dict[str, str]], list[dict[str, str]], str]:
    messages = _column(record, attr.messages)
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise BadRecordError(f"column {attr.messages!r}: expected a list of turns, got {_brief(messages)}; mend the record")
    turns = [_said(turn, attr) for turn in messages]
    system = _text(record, attr.system)
    if turns and turns[0][0] == attr.system_tag:
        system, turns = _turn("system", turns[0][1])["content"], turns[1:]
    if not turns or len(turns) % 2:
        raise BadRecordError(f"column {attr.messages!r}: expected turns in pairs, got {len(turns)}; mend or drop the record")
    roles = (
        {attr.user_tag: "user", attr.observation_tag: "observation"},
        {attr.assistant_tag: "assistant", attr.function_tag: "function"},
    )
    aligned = []
    for number, (tag, content) in enumerate(turns):
        accepted = roles[number % 2]
        if tag not in accepted:
            listed = " or ".join(map(repr, accepted))
            raise BadRecordError(f"turn {number} of column {attr.messages!r}: expected {listed}, got {tag!r}; mend the turns or the tags")
        aligned.append(_turn(accepted[tag], content))
    return aligned[:-1], aligned[-1:], system


def _said(turn: Any, attr: DatasetAttr) -> tuple[Any, Any]:
    """Return who said what."""
    if not isinstance(turn, Mapping) or attr.role_tag not in turn or attr.content_tag not in turn:
        raise BadRecordError(
            f"expected turns with {attr.role_tag!r} and {attr.content_tag!r}, got {_brief(turn)}; mend the turn or the tags"
        )
    return turn[attr.role_tag], turn[attr.content_tag]


def _turn(role: str, content: Any) -> dict[str, str]:
    if not isinstance(content, str):
        raise BadRecordError(f"expected text as what the {role} says, got {_brief(content)}; mend or drop the record")
    return {"role": role, "content": content}


def _column(record: Mapping[str, Any], name: str | None) -> Any:
    """Return what is in a column; None where the data set has none."""
    if name is None:
        return None
    if name not in record:
        listed = ", ".join(map(repr, list(record)[:12])) or "none"
        raise BadRecordError(
            f"expected a column {name!r}, got {listed}; name the columns in DatasetAttr, or None for one that there is not"
        )
    return record[name]


def _text(record: Mapping[str, Any], name: str | None) -> str:
    """Return the text in a column, "" where there is none."""
    value = _column(record, name)
    if value is not None and not isinstance(value, str):
        raise BadRecordError(f"column {name!r}: expected text, got {_brief(value)}; mend the record or the names of the columns")
    return value or ""


def _tools(tools: Any) -> str:
    if not tools:
        return ""
    return tools if isinstance(tools, str) else json.dumps(tools, ensure_ascii=False)


def _media(media: Any, media_dir: str | None) -> list[Any] | None:
    if media is None or (isinstance(media, str | Sequence) and not len(media)):
        return None
    found = list(media) if isinstance(media, Sequence) and not isinstance(media, str | bytes) else [media]
    if media_dir is None:
        return found
    return [str(Path(media_dir, one)) if isinstance(one, str) and Path(media_dir, one).is_file() else one for one in found]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
