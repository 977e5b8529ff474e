from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader import ResumeError, SequenceSource, Shuffle
from aioloader.order.ordered import OrderedIndex
from aioloader.order.repeated import RepeatedEpoch
from aioloader.protocols import Share


def repeated(num_records: int, block: int) -> tuple[RepeatedEpoch, list[int]]:
    """Return an epoch filled up to a multiple of `block`, and the records in order."""
    index = OrderedIndex(SequenceSource(range(num_records)), Shuffle(seed=3), 0)
    reader = index.open(0, None)
    records: list[int] = []
    while (span := reader.read(7)) is not None:
        records += span.records
    reader.close()
    return RepeatedEpoch(index, block), records


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 5), st.data())
def test_the_shares_of_all_ranks_are_the_epoch_and_its_beginning(num_records: int, block: int, dp_size: int, data: st.DataObject) -> None:
    epoch, records = repeated(num_records, block)
    assert epoch.num_records % block == 0
    assert num_records <= epoch.num_records < num_records + block
    start = data.draw(st.integers(0, epoch.num_records))
    max_records = data.draw(st.integers(1, 9))
    found: dict[int, int] = {}
    for index in range(dp_size):
        share, position = Share(index, dp_size), start
        reader = epoch.open_share(0, start, share)
        while (span := reader.read(max_records)) is not None:
            first = share.first_from(position)
            found |= zip(range(first, first + dp_size * len(span.records), dp_size), span.records, strict=True)
            assert [row for _, row in span.ids] == list(span.records)
            position += span.num_positions
            assert reader.cursor() == position <= epoch.num_records
        reader.close()
    assert found == {position: records[position % num_records] for position in range(start, epoch.num_records)}


def test_a_cursor_beyond_the_epoch_is_refused() -> None:
    epoch, _ = repeated(5, 4)
    with pytest.raises(ResumeError, match="a position from 0 to 8"):
        epoch.open(0, 9)
