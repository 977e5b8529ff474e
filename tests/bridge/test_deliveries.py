from __future__ import annotations

from itertools import product, zip_longest
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.bridge.deliveries import Deliveries
from aioloader.errors import SynchronizationError
from aioloader.order.mesh import Mesh


class Sample(NamedTuple):
    shard: str
    row: int
    seq: int
    sub: int
    epoch: int


def ranks(dp_size: int = 2, tp_size: int = 2, cp_size: int = 1, **options: Any) -> list[Deliveries]:
    layout = product(range(dp_size), range(cp_size), range(tp_size))
    return [
        Deliveries(Mesh(dp_rank=dp, dp_size=dp_size, cp_rank=cp, cp_size=cp_size, tp_rank=tp, tp_size=tp_size), **options)
        for dp, cp, tp in layout
    ]


def deliver(rank: Deliveries, dp_rank: int, *, step: int = 3, first: int | None = None, content: bytes = b"x") -> list[int]:
    """Deliver one micro-batch and return what the rank says after it."""
    start = 10 * dp_rank if first is None else first
    rank.note((step, dp_rank, 0, 4))
    rank.look_at([Sample("a", start + row, row, 0, 0) for row in range(4)], [memoryview(content)])
    return rank.contribution(step)


def learn(every: list[Deliveries], said: list[list[int]]) -> None:
    minimum = [min(numbers) for numbers in zip(*said, strict=True)]
    for rank in every:
        rank.learn(minimum)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_equal_peers_and_disjoint_coordinates_pass_round_after_round(dp: int, tp: int, cp: int, rounds: int) -> None:
    every = ranks(dp, tp, cp)
    for step in range(rounds):
        said = [deliver(rank, index // (tp * cp), step=step, content=bytes([index // tp])) for index, rank in enumerate(every)]
        learn(every, said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first": 11}, "expected the ranks of dp_rank 1 to get the same micro-batches, got different records"),
        ({"content": b"y"}, "expected the ranks of dp_rank 1 to get the same bytes, got the same record ids with different content"),
        ({"step": 4}, "expected all ranks at one step, got steps 3 to 4"),
    ],
)
def test_a_peer_that_differs_is_found_by_all(changes: dict[str, Any], message: str) -> None:
    every = ranks()
    said = [deliver(rank, index // 2) for index, rank in enumerate(every[:3])]
    said.append(deliver(every[3], 1, **changes))
    minimum = [min(numbers) for numbers in zip(*said, strict=True)]
    for rank in every:
        with pytest.raises(SynchronizationError, match=message):
            rank.learn(minimum)


def test_a_rank_that_failed_is_named_whatever_the_others_wait_for() -> None:
    every = ranks()
    said = [deliver(rank, index // 2, step=7) for index, rank in enumerate(every[:3])]
    said.append(every[3].failure(3))
    minimum = [min(numbers) for numbers in zip_longest(*said, fillvalue=1 << 63)]  # a round has a place for each number
    with pytest.raises(SynchronizationError, match="loader of rank 3 failed") as failed:
        every[0].learn(minimum)
    assert failed.value.missing == (3,)


def test_a_micro_batch_that_was_not_looked_at_counts_too() -> None:
    every = ranks(1, 2)
    for index, rank in enumerate(every):
        rank.note((2, 0, 0, 4 + index))
    with pytest.raises(SynchronizationError, match="different records or counts"):
        learn(every, [deliver(rank, 0) for rank in every])


def test_a_record_on_two_coordinates_is_named() -> None:
    every = ranks(3, 1)
    said = [deliver(every[0], 0), deliver(every[1], 1), deliver(every[2], 2, first=12)]
    minimum = [min(numbers) for numbers in zip(*said, strict=True)]
    with pytest.raises(SynchronizationError, match=r"same one on dp_rank 1 and 2 \(shard, row, epoch, sub: \('a', 12, 0, 0\)\)"):
        every[2].learn(minimum)
    with pytest.raises(SynchronizationError, match=r"same one on dp_rank 1 and 2; wrap"):
        every[0].learn(minimum)


def test_where_records_may_repeat_they_may() -> None:
    every = ranks(2, 1, can_repeat=True)
    learn(every, [deliver(rank, index, first=0) for index, rank in enumerate(every)])


def test_context_parallel_peers_have_parts_of_their_own() -> None:
    every = ranks(1, 2, 2)
    learn(every, [deliver(rank, 0, content=bytes([index // 2])) for index, rank in enumerate(every)])
    said = [deliver(rank, 0, content=bytes([index])) for index, rank in enumerate(every)]
    with pytest.raises(SynchronizationError, match="ranks of dp_rank 0, cp_rank 0 to get the same bytes"):
        learn(every, said)
