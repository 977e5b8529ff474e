"""What every rank says of itself before a pass, and what has to be equal for the ranks to train on one run's data. Pure.

all ranks          the number of lanes, of data- and of context-parallel ranks, the configuration, the step and epoch to begin with
ranks of one       the state of the lanes and, where each data-parallel rank has a source of its own, that source
dp_rank (peers)
each dp_rank       is taken, by equally many ranks
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from aioloader.errors import SynchronizationError
from aioloader.protocols import Json
from aioloader.state import fingerprint_hash

__all__ = ["Card", "compare", "digest", "peers_of"]

_OPERATION = "start-up check"

Key = TypeVar("Key", bound=Hashable)


class Card(NamedTuple):
    """One rank, in integers: it travels in one small all-reduce.

    Attributes:
        dp_rank: Its coordinate; several ranks that share one are peers.
        dp_size: Coordinates in all.
        cp_rank: Which part of the sequences it gets.
        cp_size: Parts in all.
        num_lanes: Of the loader.
        shared: Digest of what all ranks have to agree on.
        own: Digest of what peers have to agree on.
        epoch: Where its next record stands.
        step: The next optimizer step.
        is_resumed: 1 if a state was loaded, else 0.
        num_quarantined: Records that it knows to be left out.
    """

    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    num_lanes: int
    shared: int
    own: int
    epoch: int
    step: int
    is_resumed: int
    num_quarantined: int = 0


def digest(value: Json) -> int:
    """Return 62 bits that identify JSON data."""
    return int(fingerprint_hash(value), 16) >> 2


def peers_of(cards: Sequence[Card], dp_rank: int, cp_rank: int | None = None) -> list[int]:
    """Return the ranks with that coordinate, rising; only those that get the same part of the sequences, if `cp_rank` is given."""
    return [rank for rank, card in enumerate(cards) if card.dp_rank == dp_rank and cp_rank in (None, card.cp_rank)]


def compare(cards: Sequence[Card], explain: Callable[[int, int], str]) -> None:
    """Check that the ranks fit together.

    Args:
        cards: Of all ranks of the job, by rank; the same on each of them, so that all come to the same result.
        explain: Says how the configurations of two ranks differ.

    Raises:
        SynchronizationError: They do not; says which ranks differ, and in what.
    """
    for name in ("dp_size", "cp_size", "num_lanes"):
        _check_equal(cards, name, "give all ranks the same mesh sizes and lanes")
    _check_coordinates(cards)
    first, other = _two_that_differ(cards, lambda card: card.shared)
    if other is not None:
        raise _error(
            f"the same configuration on all {len(cards)} ranks",
            f"{_ranks(cards, lambda card: card.shared)} ({explain(first, other)})",
            "build the loader alike on every rank: same source, seed, shuffle, batch and collate",
        )
    _check_places(cards)
    _check_peers(cards, explain)


def _check_equal(cards: Sequence[Card], name: str, do: str) -> None:
    _, other = _two_that_differ(cards, lambda card: int(getattr(card, name)))
    if other is not None:
        raise _error(f"the same {name} on all ranks", _ranks(cards, lambda card: f"{name} {getattr(card, name)}"), do)


def _check_coordinates(cards: Sequence[Card]) -> None:
    """Check that the coordinates are spread evenly: a rank numbered by its global rank would otherwise train on data of its own."""
    _check_even("dp_rank", {dp_rank: peers_of(cards, dp_rank) for dp_rank in range(cards[0].dp_size)}, len(cards))
    for dp_rank in range(cards[0].dp_size):
        parts = {cp_rank: peers_of(cards, dp_rank, cp_rank) for cp_rank in range(cards[0].cp_size)}
        _check_even("cp_rank", parts, sum(map(len, parts.values())))


def _check_even(axis: str, ranks: Mapping[int, Sequence[int]], num_ranks: int) -> None:
    few, many = (choose(ranks, key=lambda at: len(ranks[at])) for choose in (min, max))
    if len(ranks[few]) != len(ranks[many]):
        raise _error(
            f"each {axis} from 0 to {len(ranks) - 1} on equally many of {num_ranks} ranks",
            f"{axis} {few} on {len(ranks[few])} and {axis} {many} on {len(ranks[many])} (ranks {_listed(ranks[many])})",
            f"take {axis} from the device mesh, not from the global rank: Mesh.from_device_mesh, Mesh.from_megatron or Mesh.from_env",
        )


def _check_places(cards: Sequence[Card]) -> None:
    """Check that no rank is left behind. A state that another number of ranks saved may be in the middle of a step.

    In one step some lanes may be in the next epoch already, where a filter takes less of them than of others.
    """
    steps = [card.step for card in cards]
    is_apart = max(steps) - min(steps) > cards[0].is_resumed
    if is_apart or len({(card.is_resumed, card.is_resumed or card.epoch) for card in cards}) > 1:
        raise _error(
            "all ranks to begin at the same step",
            _ranks(cards, lambda card: f"epoch {card.epoch}, step {card.step}{', from a loaded state,' if card.is_resumed else ''}"),
            "load the states of one checkpoint on all ranks, or on none",
        )


def _check_peers(cards: Sequence[Card], explain: Callable[[int, int], str]) -> None:
    for dp_rank in range(cards[0].dp_size):
        peers = peers_of(cards, dp_rank)
        other = next((rank for rank in peers if cards[rank].own != cards[peers[0]].own), None)
        if other is not None:
            raise _error(
                f"ranks {_listed(peers)}, which share dp_rank {dp_rank}, to read the same data from the same place",
                f"rank {peers[0]} and rank {other} that differ ({explain(peers[0], other)})",
                "choose samples by mesh.dp_rank, never by the global rank, and load the same state on them",
            )


def _two_that_differ(cards: Sequence[Card], key: Callable[[Card], Any]) -> tuple[int, int | None]:
    """Return rank 0, and the first rank that differs from it, if any."""
    return 0, next((rank for rank, card in enumerate(cards) if key(card) != key(cards[0])), None)


def _ranks(cards: Sequence[Card], key: Callable[[Card], Key]) -> str:
    """Return which ranks have which value, for messages."""
    groups: dict[Key, list[int]] = {}
    for rank, card in enumerate(cards):
        groups.setdefault(key(card), []).append(rank)
    texts = (f"{'' if isinstance(value, int) else f'{value} on '}rank {_listed(ranks)}" for value, ranks in list(groups.items())[:4])
    return " against ".join(texts)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    return shown if len(ranks) <= 6 else f"{shown}, ... ({len(ranks)} ranks)"


def _error(expected: str, got: str, do: str) -> SynchronizationError:
    return SynchronizationError(_OPERATION, f"expected {expected}, got {got}; {do}")
