"""Agents' trajectories that fit a row: what is cut keeps its structure. For use in a `preprocess` function.

    system tools | user call observation | call observation | answer
    ------------   -----------------------------------------  ------
    kept always    observations are shortened first; then     kept
                   turns go whole, the oldest first

    def preprocess(record):
        messages = [Message(turn["role"], tokenize(turn["text"]), opening=..., closing=...) for turn in record["turns"]]
        fitting = fit_messages(messages, 4096, marker=tokenize(" [...] "))
        return None if fitting is None else join_messages(fitting)

Nothing else is ever cut: a trajectory keeps the tools that its calls refer to, calls keep their observations, and a message
keeps the tokens that wrap it. One that cannot fit so is left out: the loader counts it among the filtered records. Batch with
`Pack(4096, strategy="best_fit", overflow="error")`, which cuts no sample, and `SftCollator`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aioloader.batching.options import require_choice, require_positive
from aioloader.errors import ConfigError, PreprocessError

__all__ = ["OBSERVATION_ROLES", "TRAINED_ROLES", "Message", "ObservationPolicy", "fit_messages", "join_messages"]

OBSERVATION_ROLES: Final = ("observation", "tool", "web", "logs")
"""What the environment says: may be shortened, is never trained."""

TRAINED_ROLES: Final = ("assistant", "reasoning", "tool_call", "function_call", "code")
"""What the model says."""

Shorten: TypeAlias = Callable[[Sequence[int], int], Sequence[int]]
"""Called with an observation's tokens and how many it may have at most, marker included; returns those it shall have."""

ObservationPolicy: TypeAlias = Literal["truncate", "drop_middle", "keep"] | Shorten

_POLICIES: Final = ("truncate", "drop_middle", "keep")
_OVERFLOWS: Final = ("truncate", "drop", "error")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a trajectory: its tokens, and those that wrap it (role tokens, call or observation borders).

    Attributes:
        role: `"system"`, `"tools"`, `"user"`, or one of `TRAINED_ROLES` and `OBSERVATION_ROLES`; other names are possible.
        tokens: The content.
        opening: The tokens before it, such as the role's; never cut, never trained.
        closing: The tokens after it, such as the end of the turn; never cut, trained with the content.
    """

    role: str
    tokens: Sequence[int]
    opening: Sequence[int] = ()
    closing: Sequence[int] = ()

    def __len__(self) -> int:
        """Return the number of tokens with those that wrap it."""
        return len(self.opening) + len(self.tokens) + len(self.closing)


def fit_messages(
    messages: Sequence[Message],
    max_tokens: int,
    *,
    observation: ObservationPolicy = "drop_middle",
    max_observation_tokens: int | None = None,
    min_observation_tokens: int = 64,
    marker: Sequence[int] = (),
    keep: Collection[str] = ("system", "tools"),
    overflow: Literal["truncate", "drop", "error"] = "truncate",
    observation_roles: Collection[str] = OBSERVATION_ROLES,
) -> list[Message] | None:
    """Return the messages that are kept, in order, together at most `max_tokens` long; None if the trajectory is left out.

    1. Observations longer than `max_observation_tokens` are shortened to it.
    2. If that is still too much, the longest observations are shortened to one common length, the greatest that fits, but to
       none below `min_observation_tokens`.
    3. If that does not do, `overflow` decides: whole turns are left out, the oldest first, as few as possible; or the trajectory
       is; or an error is raised. The last turn and the messages to `keep` always stay.

    A turn begins with a user message, or with whatever follows an observation and is none: so a call and its observations stay
    or go together. Messages that are not shortened are the very objects that came in.

    Args:
        messages: The trajectory.
        max_tokens: Most tokens of all messages together, wrappers included: the `seq_len` of `Pack`.
        observation: How an observation is shortened: `"truncate"` keeps its beginning, `"drop_middle"` its beginning and its end,
            both with `marker` where something is missing; `"keep"` shortens none; or a function, to summarise or sample.
        max_observation_tokens: Most tokens of an observation, wrapper not counted.
        min_observation_tokens: Fewest tokens that an observation is shortened to for the sake of `max_tokens`.
        marker: Says that something is missing; shorter than both limits.
        keep: Roles that are kept wherever they stand, `"user"` perhaps.
        overflow: `"truncate"` leaves out turns, `"drop"` returns None, `"error"` raises.
        observation_roles: Roles that may be shortened.

    Raises:
        ConfigError: An option is out of range or unknown.
        PreprocessError: The trajectory cannot fit and `overflow="error"`, or a function returned more tokens than it may.
    """
    _check_options(observation, max_tokens, max_observation_tokens, min_observation_tokens, marker, overflow)
    cuttable = () if observation == "keep" else observation_roles
    most = max_tokens if max_observation_tokens is None else max_observation_tokens
    least = min(min_observation_tokens, most)
    turns = _turns(messages, keep, observation_roles)
    num_turns = max((turn for turn in turns if turn is not None), default=0) + 1
    for first in range(num_turns if overflow == "truncate" else 1):
        kept = [message for message, turn in zip(messages, turns, strict=True) if turn is None or turn >= first]
        num_tokens = sum(_length(message, least, cuttable) for message in kept)
        if num_tokens <= max_tokens:
            limit = _common_limit(kept, max_tokens, most, cuttable)
            return [_shorten(message, limit, observation, marker) if message.role in cuttable else message for message in kept]
    if overflow == "error":
        do = "raise max_tokens, lower min_observation_tokens, or use overflow='truncate' or 'drop'"
        raise PreprocessError(f"fit_messages: expected at most max_tokens={max_tokens} tokens, got {num_tokens} at the least; {do}")
    return None


def join_messages(messages: Sequence[Message], *, trained: Collection[str] = TRAINED_ROLES) -> dict[str, NDArray[Any]]:
    """Return a sample for `Pack` and `SftCollator`: `input_ids` int64[num_tokens] and `loss_mask` bool[num_tokens].

    The loss covers the content of messages whose role is `trained` and their closing tokens, which the model has to say as well;
    not their opening tokens, which it is given.
    """
    tokens: list[int] = []
    mask: list[bool] = []
    for message in messages:
        tokens += [*message.opening, *message.tokens, *message.closing]
        is_trained = message.role in trained
        mask += [False] * len(message.opening) + [is_trained] * (len(message.tokens) + len(message.closing))
    return {"input_ids": np.array(tokens, dtype=np.int64), "loss_mask": np.array(mask, dtype=np.bool_)}


def _turns(messages: Sequence[Message], keep: Collection[str], observation_roles: Collection[str]) -> list[int | None]:
    """Return the number of each message's turn, from 0; None where its role is kept always."""
    turns: list[int | None] = []
    turn, after_observation, is_first = 0, False, True
    for message in messages:
        if message.role in keep:
            turns.append(None)
            continue
        is_observation = message.role in observation_roles
        begins = message.role == "user" or (after_observation and not is_observation)
        turn += begins and not is_first
        turns.append(turn)
        after_observation, is_first = is_observation, False
    return turns


def _length(message: Message, limit: int, cuttable: Collection[str]) -> int:
    """Return the message's length once its content is shortened to `limit` where that may be."""
    surplus = max(0, len(message.tokens) - limit) if message.role in cuttable else 0
    return len(message) - surplus


def _common_limit(messages: Sequence[Message], max_tokens: int, most: int, cuttable: Collection[str]) -> int:
    """Return the greatest length, up to `most`, that contents may be shortened to so that all messages fit."""
    lengths = sorted(min(len(message.tokens), most) for message in messages if message.role in cuttable)
    room = max_tokens - sum(_length(message, 0, cuttable) for message in messages)
    for number, length in enumerate(lengths):
        num_left = len(lengths) - number
        if length * num_left > room:
            return room // num_left
        room -= length
    return most


def _shorten(message: Message, limit: int, policy: ObservationPolicy, marker: Sequence[int]) -> Message:
    tokens = message.tokens
    if len(tokens) <= limit:
        return message
    if callable(policy):
        shorter = policy(tokens, limit)
        if len(shorter) > limit:
            do = "return no more than it was called with"
            raise PreprocessError(f"fit_messages(observation=...): expected at most {limit} tokens, got {len(shorter)}; {do}")
        return replace(message, tokens=shorter)
    room = limit - len(marker)
    tail = room // 2 if policy == "drop_middle" else 0
    return replace(message, tokens=[*tokens[: room - tail], *marker, *tokens[len(tokens) - tail :]])


def _check_options(
    observation: object, max_tokens: int, max_observation: int | None, min_observation: int, marker: Sequence[int], overflow: str
) -> None:
    if not callable(observation):
        require_choice("fit_messages(observation=...)", observation, _POLICIES)
    require_choice("fit_messages(overflow=...)", overflow, _OVERFLOWS)
    require_positive("fit_messages(max_tokens=...)", max_tokens)
    limits = {"max_observation_tokens": max_observation, "min_observation_tokens": min_observation}
    for name, limit in limits.items():
        if limit is None:
            continue
        require_positive(f"fit_messages({name}=...)", limit)
        if limit <= len(marker):
            expected, do = f"more than the marker's {len(marker)} tokens", "raise it or shorten the marker"
            raise ConfigError(f"fit_messages({name}=...)", expected=expected, got=limit, do=do)
