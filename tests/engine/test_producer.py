"""The producer's arithmetic: who gets which record under which number, and from where a resumed run reads."""

from __future__ import annotations

import json
import random
import weakref
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aioloader.batching import FixedBatch
from aioloader.engine.assembler import fresh_rank_state
from aioloader.engine.producer import CursorLog, Queue, Stamper
from aioloader.order.lanes import LaneMap
from aioloader.protocols import Json, RecordId, Span

BATCHING = FixedBatch(2)
topologies = st.tuples(st.integers(1, 4), st.integers(1, 3))


def span(first: int, stop: int) -> Span:
    ids: list[RecordId] = [("shard", row) for row in range(first, stop)]
    return Span(list(range(first, stop)), ids)


def lane_state(epoch: int, seq: int, refs: list[int] | None = None) -> Json:
    return {"epoch": epoch, "seq": seq, "sub": 0, "batcher": {"refs": [[ref, 0] for ref in refs or []]}}


def stamped(stamper: Stamper, first: int, stop: int, seed: int) -> tuple[list[tuple[int, int, int, int]], int]:
    """Return (lane, seq, row, record) of all that is queued when records come in random spans, and how many were passed over."""
    rng, queue, passed, rows = random.Random(seed), Queue(), 0, []
    while first < stop:
        end = min(stop, first + rng.randint(1, 7))
        passed += stamper.stamp(span(first, end), queue)
        first = end
        while len(queue) and rng.random() < 0.8:
            stamps, chunk = queue.cut(5, rng.randint(1, 5))
            assert len(chunk.records) == len(stamps.ids) >= 1
            assert list(chunk.ids) == list(stamps.ids)
            assert chunk.epoch == 5
            rows += [
                (lane, seq, row, record)
                for lane, seq, (_, row), record in zip(stamps.lanes, stamps.seqs, stamps.ids, chunk.records, strict=True)
            ]
    while len(queue):
        stamps, chunk = queue.cut(5, 1)
        rows.append((stamps.lanes[0], stamps.seqs[0], stamps.ids[0][1], chunk.records[0]))
    return rows, passed


def test_the_queue_lets_go_of_what_was_taken_while_others_wait() -> None:
    """Behind busy workers it is never empty: it kept every record of an epoch alive."""
    queue, num_read = Queue(), 0
    alive: list[weakref.ref[Any]] = []
    for _ in range(50):
        records = [np.zeros(1) for _ in range(10)]
        alive += map(weakref.ref, records)
        rows = range(num_read, num_read + 10)
        queue.extend([0] * 10, list(rows), [("shard", row) for row in rows], records)
        del records
        num_read += 10
        queue.cut(0, 9)
        assert sum(reference() is not None for reference in alive) == len(queue)
    assert len(queue) == 50


@given(topology=topologies, num_records=st.integers(0, 50), even=st.booleans(), seed=st.integers(0, 99))
def test_every_record_is_given_to_one_rank_under_its_own_number(topology: tuple[int, int], num_records: int, even: bool, seed: int) -> None:
    per_rank, dp_size = topology
    num_lanes = per_rank * dp_size
    seen: list[int] = []
    num_held = 0
    for dp_rank in range(dp_size):
        lanes = LaneMap(num_lanes=num_lanes, dp_rank=dp_rank, dp_size=dp_size)
        stamper = Stamper(lanes, BATCHING, fresh_rank_state(BATCHING, lanes, 0), epoch=0, position=0, even=even)
        rows, passed = stamped(stamper, 0, num_records, seed)
        for lane, seq, row, record in rows:
            assert row == record == lanes.position(lane, seq)
            assert lane in lanes.served
        assert [row for _, _, row, _ in rows] == sorted(row for _, _, row, _ in rows)
        assert passed + len(rows) + len(stamper.held) == num_records
        assert stamper.position == num_records
        seen += [row for _, _, row, _ in rows]
        num_held += len(stamper.held)
    ragged = num_records % num_lanes if even and num_lanes > 1 else 0
    assert sorted(seen) == list(range(num_records - ragged))
    assert num_held == ragged


@given(topology=topologies, num_records=st.integers(0, 50), cuts=st.lists(st.integers(0, 50)), even=st.booleans(), seed=st.integers(0, 9))
def test_a_share_is_stamped_as_what_is_left_of_the_whole(
    topology: tuple[int, int], num_records: int, cuts: list[int], even: bool, seed: int
) -> None:
    per_rank, dp_size = topology
    for dp_rank in range(dp_size):
        lanes = LaneMap(num_lanes=per_rank * dp_size, dp_rank=dp_rank, dp_size=dp_size)
        state = fresh_rank_state(BATCHING, lanes, 0)
        whole = Stamper(lanes, BATCHING, state, epoch=0, position=0, even=even)
        expected, _ = stamped(whole, 0, num_records, seed)
        dealt = Stamper(lanes, BATCHING, state, epoch=0, position=0, even=even, is_dealt=True)
        queue, position = Queue(), 0
        for stop in [*sorted(cut for cut in cuts if cut < num_records), num_records]:
            own = [row for row in range(position, stop) if row % dp_size == dp_rank]
            if own:
                stop = min(own[-1] + dp_size, num_records)  # up to the next record of the share
                assert dealt.stamp(Span(own, [("shard", row) for row in own], stop - position), queue) == 0
                position = stop
        stamps, chunk = queue.cut(5, 1000)
        found = [
            (lane, seq, row, record)
            for lane, seq, (_, row), record in zip(stamps.lanes, stamps.seqs, stamps.ids, chunk.records, strict=True)
        ]
        assert found == expected
        assert dealt.held == whole.held


@given(data=st.data(), topology=topologies, num_records=st.integers(0, 40), even=st.booleans())
def test_a_resumed_rank_gets_what_it_still_needs(data: st.DataObject, topology: tuple[int, int], num_records: int, even: bool) -> None:
    per_rank, dp_size = topology
    lanes = LaneMap(num_lanes=per_rank * dp_size, dp_rank=data.draw(st.integers(0, dp_size - 1)), dp_size=dp_size)
    states: dict[str, Any] = {}
    needed: list[tuple[int, int]] = []
    for lane in lanes.served:
        seq = data.draw(st.integers(0, 15))
        refs = sorted(data.draw(st.sets(st.integers(0, max(0, seq - 1)), max_size=2))) if seq else []
        epoch = data.draw(st.sampled_from([2, 3, 3, 3, 4]))
        states[str(lane)] = lane_state(epoch, seq, refs)
        if epoch <= 3:
            needed += [(lane, one) for one in range(60) if epoch < 3 or one >= seq or one in refs]
    stop = num_records - num_records % lanes.num_lanes if even and lanes.num_lanes > 1 else num_records
    expected = [lanes.position(lane, seq) for lane, seq in needed if lanes.position(lane, seq) < stop]
    state = {"lanes": states}
    oldest = min([lanes.position(lane, seq) for lane, seq in needed], default=0)
    position = data.draw(st.integers(0, min(oldest, num_records)))
    stamper = Stamper(lanes, BATCHING, state, epoch=3, position=position, even=even)
    rows, passed = stamped(stamper, position, num_records, data.draw(st.integers(0, 99)))
    assert [row for _, _, row, _ in rows] == sorted(expected)
    assert passed + len(rows) + len(stamper.held) == num_records - position


@given(sizes=st.lists(st.integers(1, 20), max_size=12), cut=st.integers(1, 9))
def test_queue_keeps_order_however_it_is_filled_and_cut(sizes: list[int], cut: int) -> None:
    queue, at = Queue(), 0
    out: list[int] = []
    for size in sizes:
        queue.extend([0] * size, range(at, at + size), span(at, at + size).ids, span(at, at + size).records)
        at += size
        if size % 2:
            stamps, chunk = queue.cut(1, cut)
            assert list(stamps.seqs) == list(chunk.records)
            out += chunk.records
    assert len(queue) == at - len(out)
    while len(queue):
        out += queue.cut(1, cut)[1].records
    assert out == list(range(at))


@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 60)), max_size=12), cut=st.integers(1, 9), max_bytes=st.integers(0, 200))
def test_a_chunk_takes_no_more_bytes_than_it_may(sizes: list[tuple[int, int]], cut: int, max_bytes: int) -> None:
    queue, each, at = Queue(), [nbytes for number, nbytes in sizes for _ in range(number)], 0
    for number, nbytes in sizes:
        queue.extend([0] * number, range(at, at + number), span(at, at + number).ids, span(at, at + number).records, [nbytes] * number)
        at += number
    done = 0
    while len(queue):
        chunk = queue.cut(0, cut, max_bytes)[1]
        number = len(chunk.records)
        assert chunk.raw_nbytes == sum(each[done : done + number])
        assert chunk.raw_nbytes <= max_bytes or number == 1
        done += number
        is_full = number == cut or done == at or chunk.raw_nbytes + each[done] > max_bytes
        assert is_full
    assert done == at


@given(number=st.integers(0, 7), nbytes=st.integers(0, 1000))
def test_a_chunk_in_two_parts_is_the_same_records(number: int, nbytes: int) -> None:
    queue = Queue()
    queue.extend([0] * 7, range(7), span(0, 7).ids, span(0, 7).records)
    chunk = queue.cut(3, 7)[1]._replace(raw_nbytes=nbytes, max_bytes=5)
    parts = chunk.split(number)
    assert [len(part.records) for part in parts] == [number, 7 - number]
    assert [*parts[0].records, *parts[1].records] == list(chunk.records)
    assert [*parts[0].ids, *parts[1].ids] == list(chunk.ids)
    assert sum(part.raw_nbytes for part in parts) == nbytes
    assert {(part.epoch, part.max_bytes, part.destination) for part in parts} == {(3, 5, None)}


def test_what_was_cut_is_not_changed_by_what_comes_later() -> None:
    queue = Queue()
    queue.extend([0] * 3, range(3), span(0, 3).ids, span(0, 3).records)
    stamps, chunk = queue.cut(0, 3)
    queue.extend([1], [9], [("shard", 9)], [9])
    assert (list(stamps.lanes), list(stamps.seqs), list(chunk.records)) == ([0, 0, 0], [0, 1, 2], [0, 1, 2])
    assert queue.cut(0, 3)[1].records == [9]


# Cursors


@given(places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, unique=True).map(sorted), data=st.data())
def test_the_last_cursor_before_a_place_is_found(places: list[tuple[int, int]], data: st.DataObject) -> None:
    log = CursorLog()
    asked = sorted(data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)).filter(lambda place: place >= places[0]))))
    added = 1
    log.add(places[0], f"cursor {places[0]}")
    for place in asked:
        while added < len(places) and (places[added] <= place or data.draw(st.booleans())):
            log.add(places[added], f"cursor {places[added]}")
            added += 1
        epoch, position = max(one for one in places if one <= place)
        assert log.before(place) == {"epoch": epoch, "position": position, "cursor": f"cursor {(epoch, position)}"}


def test_a_source_without_cursors_is_read_from_the_beginning_of_its_epoch() -> None:
    log = CursorLog()
    for epoch in range(2):
        for position in (0, 10, 20):
            log.add((epoch, position), None)
    assert log.before((0, 15)) == {"epoch": 0, "position": 0, "cursor": None}
    assert log.before((1, 0)) == {"epoch": 1, "position": 0, "cursor": None}
    assert log.before((1, 25)) == {"epoch": 1, "position": 0, "cursor": None}
    json.dumps(log.before((1, 25)))
