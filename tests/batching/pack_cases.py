"""What the tests of packing share: documents of given lengths, and what a packer makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from aioloader.batching import Pack
from aioloader.protocols import Group, Item, PackedRow


def make_items(lengths: Sequence[int], first_seq: int = 0) -> list[Item]:
    borders = np.cumsum([0, *lengths]).tolist()
    samples = [{"input_ids": np.arange(start, stop)} for start, stop in itertools.pairwise(borders)]
    return [Item(sample, seq, 0, ("shard", seq)) for seq, sample in enumerate(samples, start=first_seq)]


def groups_of(batching: Pack, items: Sequence[Item]) -> tuple[list[Group], dict[str, int]]:
    batcher = batching.start()
    groups = [group for item in items for group in batcher.push(item)] + list(batcher.finish())
    return groups, batcher.counters()


def rows_of(groups: Sequence[Group]) -> list[PackedRow]:
    return [row for group in groups for row in group.samples]
