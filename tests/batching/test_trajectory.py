from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.batching import Pack
from aioloader.batching.trajectory import OBSERVATION_ROLES, TRAINED_ROLES, Message, fit_messages, join_messages
from aioloader.collate import SftCollator
from aioloader.errors import ConfigError, PreprocessError
from aioloader.protocols import Item

# One token per character, and role markers of one character each that no content holds.
MARKER = [ord(character) for character in "[..]"]
NINE_PARTS = [
    ("system", "You are a careful agent."),
    ("tools", '{"run": {"code": "str"}, "open": {"url": "str"}}'),
    ("user", "How fast is it?"),
    ("reasoning", "I should look it up."),
    ("tool_call", 'open("speed")'),
    ("observation", "opened page 1"),
    ("web", "<html>" + "lorem ipsum " * 40 + "</html>"),
    ("code", "run('bench')"),
    ("logs", "step 1\n" * 30 + "done 12.5 ms"),
    ("assistant", "It takes 12.5 ms."),
]
"""System instruction, tool schema, reasoning, tool call, observation, code, web content, logs, final answer, and a question."""


def message(role: str, text: str) -> Message:
    return Message(role, [ord(character) for character in text], opening=[ord("<"), 1000 + len(role), 7], closing=[8, ord("\n")])


def messages_of(parts: Sequence[tuple[str, str]]) -> list[Message]:
    return [message(role, text) for role, text in parts]


def text_of(one: Message) -> str:
    return "".join(map(chr, one.tokens))


def roles_of(messages: Sequence[Message] | None) -> list[str]:
    assert messages is not None
    return [one.role for one in messages]


def num_tokens(messages: Sequence[Message]) -> int:
    return sum(map(len, messages))


def test_nine_parts_go_through_and_come_back() -> None:
    messages = messages_of(NINE_PARTS)
    fitting = fit_messages(messages, 10_000)
    assert fitting == messages
    sample = join_messages(fitting)
    contents = re.findall(r"\x07([^\x07\x08]*)\x08", "".join(map(chr, sample["input_ids"])))
    assert contents == [text for _, text in NINE_PARTS]
    assert [str(values.dtype) for values in sample.values()] == ["int64", "bool"]


def test_the_loss_covers_exactly_what_the_model_says() -> None:
    sample = join_messages(messages_of(NINE_PARTS))
    trained = "".join(map(chr, sample["input_ids"][sample["loss_mask"]]))
    assert trained == "".join(f"{text}\x08\n" for role, text in NINE_PARTS if role in ("reasoning", "tool_call", "code", "assistant"))


def test_trained_and_observed_roles_are_apart() -> None:
    assert not set(TRAINED_ROLES) & set(OBSERVATION_ROLES)


@pytest.mark.parametrize("policy", ["truncate", "drop_middle"])
def test_an_observation_of_100_000_tokens_becomes_as_long_as_fits_and_nothing_else_changes(policy: Any) -> None:
    messages = messages_of(NINE_PARTS)
    messages[5] = message("observation", "a" * 50_000 + "z" * 50_000)
    fitting = fit_messages(messages, 4096, observation=policy, marker=MARKER)
    assert fitting is not None
    assert num_tokens(fitting) == 4096
    assert [one for number, one in enumerate(fitting) if number != 5] == [one for number, one in enumerate(messages) if number != 5]
    shortened = fitting[5]
    assert (shortened.opening, shortened.closing) == (messages[5].opening, messages[5].closing)
    pattern = r"a+\[\.\.\]z+" if policy == "drop_middle" else r"a+\[\.\.\]"
    assert re.fullmatch(pattern, text_of(shortened))


def test_drop_middle_keeps_as_much_of_both_ends() -> None:
    fitting = fit_messages([message("observation", "abcdefghijkl")], 100, max_observation_tokens=9, marker=MARKER)
    assert fitting is not None
    assert text_of(fitting[0]) == "abc[..]kl"


def test_the_limit_of_observations_applies_where_all_would_fit() -> None:
    fitting = fit_messages(messages_of(NINE_PARTS), 10_000, max_observation_tokens=100, observation="truncate", marker=MARKER)
    assert fitting is not None
    assert [len(one.tokens) for one in fitting if one.role in OBSERVATION_ROLES] == [13, 100, 100]


def test_the_longest_observations_are_shortened_to_one_length() -> None:
    messages = [message("observation", "x" * length) for length in (300, 20, 100, 200)]
    fitting = fit_messages(messages, 320 + 4 * 5, marker=MARKER)
    assert fitting is not None
    assert [len(one.tokens) for one in fitting] == [100, 20, 100, 100]
    assert fitting[1] is messages[1]
    assert fitting[2] is messages[2]


def test_a_function_can_summarise() -> None:
    calls = []

    def summarise(tokens: Sequence[int], limit: int) -> Sequence[int]:
        calls.append((len(tokens), limit))
        return [ord(character) for character in "summary"]

    messages = [message("user", "q"), message("observation", "x" * 500), message("assistant", "a")]
    fitting = fit_messages(messages, 217, observation=summarise)
    assert fitting is not None
    assert calls == [(500, 200)]
    assert [text_of(one) for one in fitting] == ["q", "summary", "a"]


def test_a_function_that_returns_too_much_is_refused() -> None:
    with pytest.raises(PreprocessError, match=r"fit_messages\(observation=...\): expected at most 100 tokens, got 150; return no more"):
        fit_messages([message("logs", "x" * 150)], 200, observation=lambda tokens, limit: tokens, max_observation_tokens=100)


STEPS = [
    ("system", "s" * 10),
    ("tools", "t" * 10),
    ("user", "u" * 10),
    ("reasoning", "r" * 10),
    ("tool_call", "c" * 10),
    ("observation", "o" * 10),
    ("logs", "l" * 10),
    ("reasoning", "R" * 10),
    ("tool_call", "C" * 10),
    ("observation", "O" * 10),
    ("assistant", "A" * 10),
    ("user", "U" * 10),
    ("assistant", "B" * 10),
]
"""Each message is 15 tokens; turns of 5, 3, 1 and 2 messages follow the prefix."""


@pytest.mark.parametrize(
    ("max_tokens", "kept"),
    [(13 * 15, "sturcolRCOAUB"), (13 * 15 - 1, "stRCOAUB"), (8 * 15 - 1, "stAUB"), (5 * 15 - 1, "stUB"), (4 * 15, "stUB")],
)
def test_whole_turns_are_left_out_oldest_first_and_the_prefix_stays(max_tokens: int, kept: str) -> None:
    fitting = fit_messages(messages_of(STEPS), max_tokens)
    assert fitting is not None
    assert "".join(text_of(one)[0] for one in fitting) == kept


def test_what_cannot_fit_with_its_prefix_is_left_out_or_refused() -> None:
    messages = messages_of(STEPS)
    assert fit_messages(messages, 4 * 15 - 1) is None
    assert fit_messages(messages, 13 * 15 - 1, overflow="drop") is None
    message_of_error = r"stage preprocess: fit_messages: expected at most max_tokens=194 tokens, got 195 at the least; raise max_tokens"
    with pytest.raises(PreprocessError, match=message_of_error):
        fit_messages(messages, 13 * 15 - 1, overflow="error")


def test_observations_are_shortened_before_a_turn_goes() -> None:
    messages = [message("user", "u"), message("observation", "o" * 200), message("user", "v"), message("assistant", "a")]
    assert roles_of(fit_messages(messages, 100)) == ["user", "observation", "user", "assistant"]
    assert roles_of(fit_messages(messages, 100, observation="keep")) == ["user", "assistant"]
    assert roles_of(fit_messages(messages, 100, min_observation_tokens=90)) == ["user", "assistant"]


def test_any_role_can_be_kept() -> None:
    fitting = fit_messages(messages_of(STEPS), 8 * 15, keep=("system", "tools", "user"))
    assert roles_of(fitting) == ["system", "tools", "user", "assistant", "user", "assistant"]


parts = st.lists(
    st.tuples(st.sampled_from(["user", "reasoning", "tool_call", "observation", "logs", "assistant"]), st.integers(0, 120)), max_size=14
)


@settings(max_examples=150, deadline=None)
@given(
    parts=parts,
    max_tokens=st.integers(40, 500),
    policy=st.sampled_from(["truncate", "drop_middle", "keep"]),
    most=st.none() | st.integers(5, 80),
)
def test_structure_is_kept_whatever_is_cut(parts: list[tuple[str, int]], max_tokens: int, policy: Any, most: int | None) -> None:
    messages = messages_of([("system", "s" * 8), ("tools", "t" * 12), *((role, role[0] * length) for role, length in parts)])
    fitting = fit_messages(messages, max_tokens, observation=policy, max_observation_tokens=most, min_observation_tokens=10, marker=MARKER)
    if fitting is None:
        return
    assert num_tokens(fitting) <= max_tokens
    assert fitting[:2] == messages[:2]
    # What is kept is the prefix and the last messages, all with their wrappers; only observations may differ.
    last = messages[2:][len(messages) - len(fitting) :]
    for one, before in zip(fitting[2:], last, strict=True):
        assert (one.role, one.opening, one.closing) == (before.role, before.opening, before.closing)
        if one is not before:
            assert before.role in OBSERVATION_ROLES
            assert len(one.tokens) < len(before.tokens)
            assert "[..]" in text_of(one)
    # No observation without what it answers: the cut is never right before an observation.
    if len(fitting) < len(messages) and len(fitting) > 2:
        assert fitting[2].role not in OBSERVATION_ROLES
    if policy == "drop_middle" and num_tokens(messages) > max_tokens and fitting and len(fitting) == len(messages) and most is None:
        num_cut = sum(one is not before for one, before in zip(fitting, messages, strict=True))
        assert max_tokens - num_tokens(fitting) < num_cut


def test_a_trajectory_goes_through_pack_and_collator_uncut() -> None:
    fitting = fit_messages(messages_of(NINE_PARTS), 400, marker=MARKER)
    assert fitting is not None
    sample = join_messages(fitting)
    batcher = Pack(1024, strategy="best_fit", overflow="error").start()
    for seq in range(2):
        list(batcher.push(Item(sample, seq, 0, ("shard", seq))))
    (group,) = batcher.finish()
    batch = SftCollator(pad_token_id=0)(list(group.samples))
    length = len(sample["input_ids"])
    labels = np.where(sample["loss_mask"], sample["input_ids"], -100)
    for first in (0, length):
        assert (batch["input_ids"][0, first : first + length] == sample["input_ids"]).all()
        assert (batch["labels"][0, first : first + length] == labels).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tokens": 0}, r"fit_messages\(max_tokens=...\): expected an int >= 1, got 0"),
        ({"observation": "shrink"}, r"fit_messages\(observation=...\): expected one of 'truncate', 'drop_middle', 'keep', got 'shrink'"),
        ({"overflow": "split"}, r"fit_messages\(overflow=...\): expected one of 'truncate', 'drop', 'error', got 'split'"),
        ({"max_observation_tokens": -1}, r"fit_messages\(max_observation_tokens=...\): expected an int >= 1, got -1"),
        ({"max_observation_tokens": 4}, r"max_observation_tokens=...\): expected more than the marker's 4 tokens, got 4; raise it"),
        ({"min_observation_tokens": 3}, r"min_observation_tokens=...\): expected more than the marker's 4 tokens, got 3; raise it"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fit_messages([], **{"max_tokens": 100, "marker": MARKER, **options})
