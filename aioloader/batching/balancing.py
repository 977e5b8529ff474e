"""Work of known size dealt out evenly: which items each rank, lane or micro-batch gets.

The plan is a function of the lengths alone, so each rank computes the same one and nothing is communicated.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aioloader.batching.options import require_choice, require_positive
from aioloader.errors import ConfigError

__all__ = ["Cost", "balance", "imbalance"]

Cost: TypeAlias = Literal["tokens", "quadratic"] | Callable[[NDArray[np.int64]], Any]
"""What an item of so many tokens costs. A callable gets int64[n] and returns n finite numbers, none negative."""

_EXCHANGES_PER_PART = 16
"""More than are ever useful; a bound on the time, as are the next two."""
_PARTNERS = 16
"""Cheapest parts that are tried: if none of them has a suitable item, hardly another one has."""
_EVEN = 1.001
"""The costliest part against the mean: nobody can measure less."""

_Part: TypeAlias = tuple[int | float, list[int]]
"""The cost of a part and the items in it."""
_Plan: TypeAlias = list[_Part]
"""Parts by falling cost; parts without an item are left out."""


def balance(
    lengths: Sequence[int] | NDArray[Any], num_parts: int, *, cost: Cost = "tokens", equal_counts: bool = False
) -> list[NDArray[np.int64]]:
    """Return `num_parts` arrays of indices into `lengths`, so that the costliest part costs little more than the mean.

    Every index is in exactly one array. Indices rise within an array; arrays are in the order of their first index, empty ones
    last. The costliest part never costs more than the costliest of dealing the items out in turn. Equal lengths are told apart
    by their index, so the plan is the same on every rank; a callable whose results differ between kinds of hardware has to round.

    Takes O(n (log n + num_parts)) time and O(n) memory; n is the number of items.

    Args:
        lengths: int[n], tokens of each item.
        num_parts: At least 1.
        cost: `"tokens"` is the length; `"quadratic"` its square, as attention over long documents; or a callable.
        equal_counts: Whether all parts get the same number of items, as where ranks must agree on the number of micro-batches.

    Raises:
        ConfigError: An argument is out of range, or the items cannot be dealt out in equal numbers.

    Source: N. Karmarkar and R. M. Karp, "The differencing method of set partitioning" (UC Berkeley, UCB/CSD 82/113, 1982); with equal
    counts W. Michiels, J. Korst, E. Aarts and J. van Leeuwen, "Performance ratios for the differencing method applied to the
    balanced number partitioning problem" (STACS 2003), which starts from blocks of `num_parts` items; there a few items are then
    exchanged, because a block that one very long item is in cannot make up for it.
    """
    require_positive("balance(num_parts=...)", num_parts)
    costs = _costs(_as_lengths("balance(lengths=...)", lengths), cost)
    if equal_counts and len(costs) % num_parts:
        do = "leave out or repeat some, or set equal_counts=False"
        raise ConfigError("balance(lengths=...)", expected=f"a multiple of num_parts={num_parts} items", got=len(costs), do=do)
    falling = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    first = _differencing(costs, falling, num_parts, block_size=num_parts if equal_counts else 1)
    plans = [first, _in_turn(costs, falling, num_parts), _in_turn(costs, range(len(costs)), num_parts)]
    best = min(plans, key=lambda plan: max((part_cost for part_cost, _ in plan), default=0))
    parts = _exchange(costs, best) if equal_counts else [items for _, items in best]
    arrays = [np.array(sorted(items), dtype=np.int64) for items in sorted(parts, key=min)]
    return arrays + [np.empty(0, dtype=np.int64) for _ in range(num_parts - len(arrays))]


def imbalance(lengths: Sequence[int] | NDArray[Any], parts: Sequence[NDArray[np.int64]], *, cost: Cost = "tokens") -> float:
    """Return the cost of the costliest part, divided by the mean of all parts: 1.0 is perfect, also where all cost nothing.

    Raises:
        ConfigError: An argument is out of range.
    """
    costs = np.array(_costs(_as_lengths("imbalance(lengths=...)", lengths), cost), dtype=np.float64)
    if not len(parts):
        raise ConfigError("imbalance(parts=...)", expected="at least one part", got=0, do="pass what balance() returned")
    sums = np.array([costs[part].sum() for part in parts])
    return float(sums.max() / sums.mean()) if sums.any() else 1.0


def _as_lengths(where: str, lengths: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    array = np.asarray(lengths)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0:
        got = f"{array.dtype}{list(array.shape)}" if array.ndim != 1 or array.dtype.kind not in "iu" else int(array.min())
        raise ConfigError(where, expected="a row of whole numbers >= 0", got=got, do="give the tokens of each item")
    return array.astype(np.int64)


def _costs(lengths: NDArray[np.int64], cost: Cost) -> list[int | float]:
    """Return the cost of each item; Python's ints, so that sums are exact."""
    if not callable(cost):
        require_choice("balance(cost=...)", cost, ("tokens", "quadratic"))
        return [length * length for length in lengths.tolist()] if cost == "quadratic" else lengths.tolist()
    costs = np.asarray(cost(lengths))
    if costs.shape != lengths.shape or costs.dtype.kind not in "iuf" or not np.isfinite(costs).all() or (costs < 0).any():
        expected = f"a callable that returns {len(lengths)} finite numbers >= 0"
        raise ConfigError(
            "balance(cost=...)", expected=expected, got=f"{costs.dtype}{list(costs.shape)}: {costs!r}", do="map each length to a cost"
        )
    numbers: list[int | float] = costs.tolist()
    return numbers


def _differencing(costs: Sequence[int | float], falling: Sequence[int], num_parts: int, *, block_size: int) -> _Plan:
    """Return the plan that is left when the two plans of the largest difference are merged again and again.

    It begins with a plan for each block of items; merging plans of `num_parts` parts each keeps their counts equal.
    """
    blocks = [falling[at : at + block_size] for at in range(0, len(falling), block_size)]
    heap = [_entry(number, [(costs[item], [item]) for item in block], num_parts) for number, block in enumerate(blocks)]
    heapq.heapify(heap)
    for number in range(len(blocks), 2 * len(blocks) - 1):
        _, _, one = heapq.heappop(heap)
        _, _, two = heap[0]
        heapq.heapreplace(heap, _entry(number, _merge(one, two, num_parts), num_parts))
    return heap[0][2] if heap else []


def _entry(number: int, plan: _Plan, num_parts: int) -> tuple[int | float, int, _Plan]:
    """Return a plan for the heap, the largest difference first; the numbers decide ties."""
    least = plan[-1][0] if len(plan) == num_parts else 0
    return least - plan[0][0], number, plan


def _merge(one: _Plan, two: _Plan, num_parts: int) -> _Plan:
    """Join the costliest part of one plan with the cheapest of the other, and so on."""
    num_joined = max(0, len(one) + len(two) - num_parts)
    alone_one, alone_two = len(one) - num_joined, len(two) - num_joined
    joined = [
        (cost + more, _concatenate(items, rest)) for (cost, items), (more, rest) in zip(one[alone_one:], two[alone_two:][::-1], strict=True)
    ]
    return sorted([*one[:alone_one], *two[:alone_two], *joined], key=itemgetter(0), reverse=True)


def _concatenate(items: list[int], others: list[int]) -> list[int]:
    """Move the shorter list into the longer one: each item is moved O(log n) times."""
    longer, shorter = (items, others) if len(items) >= len(others) else (others, items)
    longer.extend(shorter)
    return longer


def _in_turn(costs: Sequence[int | float], order: Iterable[int], num_parts: int) -> _Plan:
    """Deal the items out one by one."""
    order = list(order)
    dealt = [order[first::num_parts] for first in range(min(num_parts, len(order)))]
    return [(sum(costs[item] for item in items), items) for items in dealt]


def _exchange(costs: Sequence[int | float], plan: _Plan) -> list[list[int]]:
    """Return the items of each part after swaps between the costliest part and a cheap one.

    A part that no swap makes cheaper, as one with a very long item, is set aside, until those that are left are even.
    """
    parts = [sorted(items, key=costs.__getitem__) for _, items in plan]
    sums = [cost for cost, _ in plan]
    left = list(range(len(parts)))
    for _ in range(_EXCHANGES_PER_PART * len(parts)):
        left.sort(key=sums.__getitem__)
        if not left or sums[left[-1]] * len(left) <= _EVEN * sum(sums[part] for part in left):
            break
        high = left[-1]
        for low in left[: min(_PARTNERS, len(left) - 1)]:
            swap = _best_swap(costs, parts[high], parts[low], sums[high] - sums[low])
            if swap is not None:
                _swap(costs, parts, sums, (high, low), swap)
                break
        else:
            left.pop()
    return parts


def _swap(
    costs: Sequence[int | float], parts: list[list[int]], sums: list[int | float], pair: tuple[int, int], places: tuple[int, int]
) -> None:
    """Swap one item of each part of a pair; both stay sorted."""
    (high, low), (out, back) = pair, places
    moved = costs[parts[high][out]] - costs[parts[low][back]]
    sums[high], sums[low] = sums[high] - moved, sums[low] + moved
    parts[high][out], parts[low][back] = parts[low][back], parts[high][out]
    for changed in pair:
        parts[changed].sort(key=costs.__getitem__)


def _best_swap(costs: Sequence[int | float], high: Sequence[int], low: Sequence[int], gap: int | float) -> tuple[int, int] | None:
    """Return the places of the items, one of each part, whose swap halves the gap best; None if every swap leaves it or turns it round.

    Both parts are sorted by rising cost.
    """
    low_costs = [costs[item] for item in low]
    best, place = gap, None
    for out, item in enumerate(high):
        back = bisect_left(low_costs, costs[item] - gap / 2)
        for near in range(max(0, back - 1), min(len(low), back + 1)):
            left = abs(gap - 2 * (costs[item] - low_costs[near]))
            if left < best:
                best, place = left, (out, near)
    return place
