from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from aioloader import ConfigError, Mesh, SourceError
from aioloader.dropin.align import DatasetAttr, align_dataset
from aioloader.dropin.alignment import BadRecordError, align_record, broken_record
from aioloader.dropin.async_preprocess import AsyncPreprocessIterableDataset
from aioloader.dropin.distributed_iterable import DistributedIterableDataset
from tests.dropin import stream_cases as cases
from tests.dropin.hugging_face import datasets, streamed, write_json_lines
from tests.dropin.stream_cases import rest_of, split_at

CHAT = DatasetAttr(formatting="sharegpt", system="sys", tools="tools", images="pictures")
OPENAI = DatasetAttr(
    formatting="sharegpt", messages="messages", role_tag="role", content_tag="content", user_tag="user", assistant_tag="assistant"
)
MEDIA_NONE = {"_images": None, "_videos": None, "_audios": None}


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in turns]


def roles(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def chat(number: int) -> dict[str, Any]:
    """Return a good record, but for every fourth, whose last turn is missing."""
    turns = [("human", f"question {number}"), ("gpt", f"answer {number}")]
    return {"conversations": said(*turns[: 1 if number % 4 == 3 else 2])}


PLAIN = DatasetAttr(formatting="sharegpt")


def questions(rows: Any) -> list[int | None]:
    """Return the number of each row's question, None for an empty one."""
    return [int(row["_prompt"][0]["content"].split()[1]) if row["_prompt"] else None for row in rows]


# One record


@pytest.mark.parametrize(
    ("record", "attr", "expected"),
    [
        (
            {"instruction": "Add.", "input": "1 2", "output": "3", "other": 5},
            DatasetAttr(),
            {"_prompt": roles(("user", "Add.\n1 2")), "_response": roles(("assistant", "3")), "_system": "", "_tools": "", **MEDIA_NONE},
        ),
        (
            {"q": "Now?", "more": "", "a": None, "past": [["Hi", "Hello"], ("How?", "Fine")], "s": "Be kind."},
            DatasetAttr(prompt="q", query="more", response="a", history="past", system="s"),
            {
                "_prompt": roles(("user", "Hi"), ("assistant", "Hello"), ("user", "How?"), ("assistant", "Fine"), ("user", "Now?")),
                "_response": [],
                "_system": "Be kind.",
                "_tools": "",
                **MEDIA_NONE,
            },
        ),
        (
            {
                "conversations": said(
                    ("system", "Use tools."), ("human", "2+2?"), ("function_call", "{}"), ("observation", "4"), ("gpt", "Four")
                ),
                "sys": "not this one",
                "tools": [{"name": "add"}],
                "pictures": "cat.png",
            },
            CHAT,
            {
                "_prompt": roles(("user", "2+2?"), ("function", "{}"), ("observation", "4")),
                "_response": roles(("assistant", "Four")),
                "_system": "Use tools.",
                "_tools": '[{"name": "add"}]',
                "_images": ["cat.png"],
                "_videos": None,
                "_audios": None,
            },
        ),
        (
            {"messages": roles(("user", "Hi"), ("assistant", "Hello"))},
            OPENAI,
            {"_prompt": roles(("user", "Hi")), "_response": roles(("assistant", "Hello")), "_system": "", "_tools": "", **MEDIA_NONE},
        ),
        (
            {"conversations": said(("human", "a"), ("gpt", "b")), "sys": "S", "tools": "[]", "pictures": []},
            CHAT,
            {"_prompt": roles(("user", "a")), "_response": roles(("assistant", "b")), "_system": "S", "_tools": "[]", **MEDIA_NONE},
        ),
    ],
    ids=["alpaca", "history", "tools", "openai", "system column"],
)
def test_a_record_becomes_the_aligned_columns(record: dict[str, Any], attr: DatasetAttr, expected: dict[str, Any]) -> None:
    before = json.dumps(record)
    assert align_record(record, attr) == expected
    assert json.dumps(record) == before


@pytest.mark.parametrize(
    ("record", "attr", "match"),
    [
        ("text", PLAIN, "a record that is a mapping, got str"),
        ({"messages": []}, PLAIN, "expected a column 'conversations', got 'messages'"),
        ({"conversations": "hello"}, PLAIN, "expected a list of turns, got 'hello'"),
        ({"conversations": []}, PLAIN, "turns in pairs, got 0"),
        ({"conversations": said(("human", "a"))}, PLAIN, "turns in pairs, got 1"),
        ({"conversations": said(("human", "a"), ("bot", "b"))}, PLAIN, "turn 1 .*expected 'gpt' or 'function_call', got 'bot'"),
        ({"conversations": said(("gpt", "a"), ("human", "b"))}, PLAIN, "turn 0 .*expected 'human' or 'observation', got 'gpt'"),
        ({"conversations": [{"role": "user"}]}, PLAIN, "expected turns with 'from' and 'value'"),
        (
            {"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": "b"}]},
            PLAIN,
            "expected text as what the user says",
        ),
        ({"instruction": "", "input": None, "output": "x"}, DatasetAttr(), "expected a prompt in column 'instruction' or 'input'"),
        ({"instruction": 5, "input": "", "output": "x"}, DatasetAttr(), "column 'instruction': expected text, got 5"),
        ({"instruction": "a", "input": "", "output": "x", "h": ["b"]}, DatasetAttr(history="h"), "expected pairs of prompt and response"),
    ],
)
def test_a_bad_record_says_what_is_wrong(record: Any, attr: DatasetAttr, match: str) -> None:
    with pytest.raises(BadRecordError, match=match):
        align_record(record, attr)


def test_media_are_found_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"png")
    attr = DatasetAttr(images="images", media_dir=str(tmp_path))
    record = {"instruction": "a", "input": "", "output": "b", "images": ["cat.png", "dog.png", b"raw"]}
    assert align_record(record, attr)["_images"] == [str(tmp_path / "cat.png"), "dog.png", b"raw"]


@pytest.mark.parametrize("options", [{"formatting": "openai"}, {"messages": None}, {"prompt": 3}, {"role_tag": ""}])
def test_a_wrong_format_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"DatasetAttr\\({next(iter(options))}=\\)"):
        DatasetAttr(**options)


# Datasets


@pytest.mark.parametrize("kind", ["list", "generator function", "stream", "map-style"])
def test_datasets_of_all_kinds_are_aligned_in_order(kind: str, tmp_path: Path) -> None:
    rows = [chat(number) for number in range(0, 40, 4)]
    makers: dict[str, Callable[[], Any]] = {
        "list": lambda: rows,
        "generator function": lambda: lambda: iter(rows),
        "stream": lambda: streamed(write_json_lines(tmp_path, rows)),
        "map-style": lambda: datasets.Dataset.from_list(rows),
    }
    aligned = align_dataset(makers[kind](), PLAIN)
    assert questions(aligned) == list(range(0, 40, 4))
    assert list(next(iter(aligned))) == ["_prompt", "_response", "_system", "_tools", "_images", "_videos", "_audios"]
    for number in range(11):
        first, state = split_at(align_dataset(makers[kind](), PLAIN), number)
        assert questions(first) + questions(rest_of(align_dataset(makers[kind](), PLAIN), state)) == list(range(0, 40, 4))


def test_no_record_is_used_up_to_learn_the_columns() -> None:
    generator = (chat(4 * number) for number in range(3))
    aligned = align_dataset(generator, PLAIN)
    assert len(list(generator)) == 3, "nothing was read"
    assert questions(align_dataset((chat(4 * number) for number in range(3)), PLAIN)) == [0, 4, 8]
    del aligned


def test_a_bad_record_is_raised_in_its_place_and_again_after_a_resume() -> None:
    aligned = align_dataset(lambda: map(chat, range(10)), PLAIN)
    iterator = iter(aligned)
    assert questions(itertools.islice(iterator, 3)) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(SourceError, match=r"iterable\[3\].*turns in pairs, got 1.*bad_records='drop'"):
            next(iterator)
    with pytest.raises(SourceError, match=r"iterable\[3\]"):
        rest_of(align_dataset(lambda: map(chat, range(10)), PLAIN), cases.through_json(aligned.state_dict()))


@pytest.mark.parametrize(
    ("bad_records", "expected"),
    [("drop", [0, 1, 2, 4, 5, 6, 8, 9]), ("empty", [0, 1, 2, None, 4, 5, 6, None, 8, 9])],
)
def test_bad_records_are_left_out_or_empty_where_that_is_asked_for(bad_records: str, expected: list[int | None]) -> None:
    def make(rank: int = 0, size: int = 1) -> Any:
        aligned = align_dataset([chat(number) for number in range(10)], PLAIN, bad_records=bad_records)
        return DistributedIterableDataset(aligned, Mesh(dp_rank=rank, dp_size=size), outer_batch_size=1)

    assert questions(make()) == expected
    assert [questions(make(rank, 2)) for rank in range(2)] == [expected[0::2], expected[1::2]]
    assert questions(DataLoader(make(1, 2), batch_size=None, num_workers=2)) == expected[1::2]
    for number in range(len(expected) + 1):
        first, state = split_at(make(), number)
        assert questions(first) + questions(rest_of(make(), state)) == expected
    preprocessed = AsyncPreprocessIterableDataset(make(1, 2), cases.same, **cases.INLINE)
    assert questions(preprocessed) == expected[1::2]


def test_what_stands_for_a_bad_record_has_all_columns() -> None:
    assert list(broken_record()) == list(align_record(chat(0), PLAIN))


def test_aligning_after_dealing_is_the_same() -> None:
    rows = [chat(4 * number) for number in range(9)]
    dealt = DistributedIterableDataset(rows, Mesh(dp_rank=1, dp_size=2))
    within = AsyncPreprocessIterableDataset(align_dataset(dealt, PLAIN), cases.same, outer_batch_size=2, **cases.INLINE)
    assert questions(within) == [4, 12, 20, 28]
    assert questions(DataLoader(within, batch_size=2, num_workers=2, collate_fn=lambda rows: rows[0])) == [4, 20]


def test_the_epoch_is_passed_on_and_a_dataloader_deals() -> None:
    upstream = cases.Counting(6)
    aligned = align_dataset(upstream, DatasetAttr(prompt="i", query=None, response=None), bad_records="empty", outer_batch_size=1)
    aligned.set_epoch(2)
    assert len(list(aligned)) == 6
    assert upstream.epochs == [2]
    assert len(list(DataLoader(aligned, batch_size=None, num_workers=2))) == 6


@pytest.mark.parametrize(("attr", "bad_records"), [("sharegpt", "raise"), (PLAIN, "ignore")])
def test_wrong_arguments_are_refused(attr: Any, bad_records: str) -> None:
    with pytest.raises(ConfigError, match="align_dataset"):
        align_dataset([], attr, bad_records=bad_records)
