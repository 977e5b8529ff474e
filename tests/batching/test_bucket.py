from __future__ import annotations

import copy
import itertools
import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.batching import FixedBatch
from aioloader.batching.bucket import Bucket
from aioloader.errors import BatchError, ConfigError, ResumeError
from aioloader.protocols import Batching, Group, Item

MAX_LENGTH = 30
boundaries_lists = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=5, unique=True).map(sorted)


@st.composite
def bucketings(draw: st.DrawFn) -> Bucket:
    boundaries = draw(boundaries_lists)
    sizes = draw(st.lists(st.integers(1, 5), min_size=len(boundaries), max_size=len(boundaries)))
    filled_by: dict[str, Any] = draw(
        st.sampled_from([{"batch_size": sizes}, {"batch_size": sizes[0]}, {"max_tokens": boundaries[-1] + 7 * sizes[0]}])
    )
    largest = max(Bucket(boundaries, **filled_by).capacities)
    return Bucket(
        boundaries,
        **filled_by,
        lookahead=draw(st.none() | st.integers(largest, largest + 6)),
        max_age=draw(st.none() | st.integers(1, 12)),
        overflow=draw(st.sampled_from(["drop", "alone"])),
    )


lengths_lists = st.lists(st.integers(0, MAX_LENGTH + 5), max_size=50)


def make_items(lengths: Sequence[int]) -> list[Item]:
    return [Item({"input_ids": [seq] * length}, seq, 0, ("shard", seq)) for seq, length in enumerate(lengths)]


def groups_of(batching: Batching, lengths: Sequence[int]) -> tuple[list[Group], dict[str, int]]:
    batcher = batching.start()
    groups = [group for item in make_items(lengths) for group in batcher.push(item)] + list(batcher.finish())
    return groups, {name: count for name, count in batcher.counters().items() if count}


def lengths_of(groups: Sequence[Group]) -> list[list[int]]:
    return [[len(sample["input_ids"]) for sample in group.samples] for group in groups]


def seqs_of(groups: Sequence[Group]) -> list[list[int]]:
    return [[item.seq for item in group.items] for group in groups]


def padding_ratio(groups: Sequence[Group]) -> float:
    padded = sum(len(group) * max(group) for group in lengths_of(groups))
    return 1 - sum(map(sum, lengths_of(groups))) / padded


def lognormal(num_samples: int, seed: int = 0) -> list[int]:
    lengths: list[int] = np.clip(np.random.default_rng(seed).lognormal(5, 1, num_samples), 1, 2048).astype(int).tolist()
    return lengths


def test_full_buckets_come_out_and_the_rest_oldest_first() -> None:
    groups, counters = groups_of(Bucket([8, 32], batch_size=(4, 2)), [3, 17, 4, 2, 30, 5, 9, 8, 1])
    assert lengths_of(groups) == [[17, 30], [3, 4, 2, 5], [9], [8, 1]]
    assert [group.complete for group in groups] == [True, True, False, False]
    assert counters == {}


def test_max_tokens_fills_each_bucket_to_its_boundary() -> None:
    batching = Bucket([4, 10, 32], max_tokens=40)
    assert batching.capacities == (10, 4, 1)
    groups, _ = groups_of(batching, [11, 5, 10, 6, 9, 1])
    assert lengths_of(groups) == [[11], [5, 10, 6, 9], [1]]


@settings(max_examples=150, deadline=None)
@given(batching=bucketings(), lengths=lengths_lists)
def test_every_sample_comes_once_or_is_counted(batching: Bucket, lengths: list[int]) -> None:
    groups, counters = groups_of(batching, lengths)
    too_long = [length for length in lengths if length > batching.boundaries[-1]]
    kept = [seq for seq, length in enumerate(lengths) if length and (length not in too_long or batching.overflow == "alone")]
    assert sorted(itertools.chain(*seqs_of(groups))) == kept
    name = "dropped" if batching.overflow == "drop" else "alone"
    expected = {"empty_samples": lengths.count(0), f"{name}_samples": len(too_long), f"{name}_tokens": sum(too_long)}
    counters.pop("early_groups", None)
    assert counters == {name: count for name, count in expected.items() if count}


@settings(max_examples=150, deadline=None)
@given(batching=bucketings(), lengths=lengths_lists)
def test_groups_are_of_one_bucket_in_order_and_within_its_limit(batching: Bucket, lengths: list[int]) -> None:
    groups, counters = groups_of(batching, lengths)
    last_seq = dict.fromkeys(range(len(batching.boundaries) + 1), -1)
    num_early = 0
    for group, seqs in zip(lengths_of(groups), seqs_of(groups), strict=True):
        (bucket,) = {bisect_left(batching.boundaries, length) for length in group}
        capacity = (*batching.capacities, 1)[bucket]
        assert len(group) <= capacity
        if batching.max_tokens is not None and bucket < len(batching.boundaries):
            assert len(group) * batching.boundaries[bucket] <= batching.max_tokens
        assert [last_seq[bucket], *seqs] == sorted([last_seq[bucket], *seqs])
        last_seq[bucket] = seqs[-1]
        num_early += len(group) < capacity
    num_left = sum(not group.complete for group in groups)
    assert counters.get("early_groups", 0) == num_early - num_left


@settings(max_examples=150, deadline=None)
@given(batching=bucketings(), lengths=lengths_lists)
def test_no_sample_waits_longer_than_max_age_and_no_more_than_lookahead_wait(batching: Bucket, lengths: list[int]) -> None:
    batcher = batching.start()
    max_age = batching.max_age or 32 * max(batching.capacities)
    lookahead = batching.lookahead or 8 * max(batching.capacities)
    arrivals: dict[int, int] = {}
    num_kept = 0
    for item, length in zip(make_items(lengths), lengths, strict=True):
        if length and (length <= batching.boundaries[-1] or batching.overflow == "alone"):
            arrivals[item.seq] = num_kept
            num_kept += 1
        for seq in itertools.chain(*seqs_of(list(batcher.push(item)))):
            assert num_kept - 1 - arrivals.pop(seq) <= max_age
        assert all(num_kept - 1 - arrival < max_age for arrival in arrivals.values())
        assert len(arrivals) <= lookahead


def test_a_rare_bucket_is_not_starved() -> None:
    lengths = [3] * 5 + [100] + [3] * 500
    groups, counters = groups_of(Bucket([8, 128], batch_size=4, max_age=40), lengths)
    (at,) = [index for index, group in enumerate(lengths_of(groups)) if 100 in group]
    assert groups[at].complete
    assert sum(map(len, lengths_of(groups)[: at + 1])) <= 5 + 1 + 40
    assert counters == {"early_groups": 1}


def test_at_the_limit_of_lookahead_the_bucket_with_the_oldest_sample_goes() -> None:
    batcher = Bucket([1, 2, 3], batch_size=3, lookahead=4).start()
    emitted = [lengths_of(list(batcher.push(item))) for item in make_items([1, 2, 2, 3, 3])]
    assert emitted == [[], [], [], [], [[1]]]
    emitted = [lengths_of(list(batcher.push(item))) for item in make_items([1])]
    assert emitted == [[[2, 2]]]
    assert lengths_of(list(batcher.finish())) == [[3, 3], [1]]


def test_a_push_can_fill_one_bucket_and_age_another() -> None:
    batcher = Bucket([1, 2], batch_size=2, max_age=3).start()
    items = make_items([2, 1, 1, 1])
    emitted = [lengths_of(list(batcher.push(item))) for item in items]
    assert emitted == [[], [], [[1, 1]], [[2]]]
    batcher = Bucket([1, 2], batch_size=2, max_age=2).start()
    emitted = [lengths_of(list(batcher.push(item))) for item in items]
    assert emitted == [[], [], [[1, 1], [2]], []]


def test_state_between_groups_of_a_push_and_of_the_end() -> None:
    items = make_items([2, 1, 1, 3, 2])
    batching = Bucket([1, 2, 3], batch_size=2, max_age=2)
    batcher = batching.start()
    states = [batcher.state() for item in items[:3] for _ in batcher.push(item)]
    assert [(state["due"], state["buckets"]) for state in states] == [([[[0, 0]]], []), ([], [])]
    assert [list(batcher.push(item)) for item in items[3:]] == [[], []]
    states = [batcher.state()["buckets"] for _ in batcher.finish()]
    assert states == [[[1, 0, [[4, 0]]]], []]


@settings(max_examples=60, deadline=None)
@given(batching=bucketings(), lengths=lengths_lists)
def test_resume_at_any_group_equals_the_uninterrupted_run(batching: Bucket, lengths: list[int]) -> None:
    items = make_items(lengths)
    batcher = batching.start()
    taken: list[tuple[int, str]] = []
    for number, item in enumerate(items, start=1):
        taken += [(number, json.dumps(batcher.state())) for _ in batcher.push(item)]
    taken += [(len(items), json.dumps(batcher.state())) for _ in batcher.finish()]
    expected = seqs_of(groups_of(batching, lengths)[0])
    for index, (number, text) in enumerate(taken):
        again, state = batching.start(), json.loads(text)
        again.restore(state, {ref: copy.deepcopy(items[ref[0]]) for ref in again.refs(state)})
        rest = [*again.ready(), *(group for item in items[number:] for group in again.push(item)), *again.finish()]
        assert seqs_of(rest) == expected[index + 1 :]
        assert again.counters() == batcher.counters()


def test_over_long_samples_are_alone_at_once() -> None:
    groups, counters = groups_of(Bucket([4], batch_size=2, overflow="alone"), [1, 9, 8, 2])
    assert lengths_of(groups) == [[9], [8], [1, 2]]
    assert all(group.complete for group in groups)
    assert counters == {"alone_samples": 2, "alone_tokens": 17}


def test_overflow_error_names_the_record_and_keeps_the_buffer() -> None:
    batcher = Bucket([8], batch_size=2).start()
    fits, too_long = make_items([3, 9])
    list(batcher.push(fits))
    before = batcher.state()
    with pytest.raises(BatchError, match=r"record shard\[1\], seq 1: Bucket: expected at most 8 tokens, got 9; shorten"):
        batcher.push(too_long)
    assert batcher.state() == before


def test_a_sample_that_belongs_elsewhere_now_is_refused_on_restore() -> None:
    batcher = Bucket([2, 8], batch_size=2).start()
    (item,) = make_items([3])
    list(batcher.push(item))
    with pytest.raises(ResumeError, match=r"seq 0: expected '2 tokens' \(this loader\), got '3 to 8 tokens' \(the state\)"):
        Bucket([2, 8], batch_size=2).start().restore(batcher.state(), {(0, 0): item._replace(sample={"input_ids": [1, 2]})})


def test_buckets_pad_much_less_than_fixed_batches() -> None:
    lengths = lognormal(8000)
    bucketed, counters = groups_of(Bucket([32, 64, 128, 256, 512, 1024, 2048], batch_size=32), lengths)
    fixed, _ = groups_of(FixedBatch(32), lengths)
    assert padding_ratio(fixed) > 0.7
    assert padding_ratio(bucketed) < 0.3
    assert counters["early_groups"] < 0.1 * len(bucketed)


def test_groups_do_not_come_sorted_by_length() -> None:
    lengths = np.random.default_rng(3).integers(1, 401, 4000).tolist()
    groups, _ = groups_of(Bucket(list(range(50, 401, 50)), batch_size=16), lengths)
    means = [np.mean(group) for group in lengths_of(groups) if len(group) == 16]
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.2


def test_state_is_bounded_by_lookahead() -> None:
    batcher = Bucket([32, 128, 512, 2048], batch_size=16, lookahead=20).start()
    largest = 0
    for item in make_items(lognormal(1000)):
        list(batcher.push(item))
        largest = max(largest, len(list(batcher.refs(batcher.state()))))
    assert largest == 20


def test_equal_options_identify_alike_however_they_were_given() -> None:
    assert Bucket([8, 16], batch_size=[4, 4]) == Bucket((8, 16), batch_size=(4, 4))
    plain = Bucket([8, 16], batch_size=4)
    assert plain.fingerprint() == Bucket([8, 16], batch_size=[4, 4], lookahead=32, max_age=128).fingerprint()
    assert plain.fingerprint() != Bucket([8, 16], batch_size=4, max_age=127).fingerprint()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundaries": []}, r"Bucket\(boundaries=...\): expected one or more ints, got \[\]; give a list"),
        ({"boundaries": 8}, r"Bucket\(boundaries=...\): expected one or more ints, got 8"),
        ({"boundaries": "48"}, r"Bucket\(boundaries=...\): expected one or more ints, got '48'"),
        ({"boundaries": [4, 0]}, r"Bucket\(boundaries=...\): expected an int >= 1, got 0"),
        ({"boundaries": [4, 4]}, r"Bucket\(boundaries=...\): expected strictly rising lengths, got \(4, 4\); sort them"),
        ({"batch_size": None}, r"Bucket\(batch_size=..., max_tokens=...\): expected one of the two, got neither; say when"),
        ({"max_tokens": 16}, r"Bucket\(batch_size=..., max_tokens=...\): expected one of the two, got both"),
        ({"batch_size": 0}, r"Bucket\(batch_size=...\): expected an int >= 1, got 0"),
        ({"batch_size": True}, r"Bucket\(batch_size=...\): expected an int >= 1, got True"),
        ({"batch_size": [2]}, r"Bucket\(batch_size=...\): expected one number or 2, got 1; give one for each boundary"),
        ({"batch_size": [2, 2.5]}, r"Bucket\(batch_size=...\): expected an int >= 1, got 2.5"),
        ({"batch_size": None, "max_tokens": 7}, r"Bucket\(max_tokens=...\): expected at least the last boundary, 8, got 7; raise it"),
        ({"batch_size": [2, 5], "lookahead": 4}, r"Bucket\(lookahead=...\): expected at least the largest micro-batch, 5, got 4; raise it"),
        ({"lookahead": -1}, r"Bucket\(lookahead=...\): expected an int >= 1, got -1"),
        ({"max_age": 0}, r"Bucket\(max_age=...\): expected an int >= 1, got 0"),
        ({"overflow": "truncate"}, r"Bucket\(overflow=...\): expected one of 'error', 'drop', 'alone', got 'truncate'"),
        ({"field": ""}, r"Bucket\(field=...\): expected a field name, got ''"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Bucket(**{"boundaries": [4, 8], "batch_size": 2, **options})
