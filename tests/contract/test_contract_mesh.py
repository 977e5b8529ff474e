"""Ranks that share a dp_rank get the same micro-batches, whoever reads them; ranks that do not fit together are told apart by name.

Four real ranks, two data-parallel times two tensor-parallel: ranks 0 and 1 are peers, and 2 and 3.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from aioloader import Loader, Mesh
from tests.contract import mesh_cases
from tests.contract.mesh_work import plain
from tests.contract.uneven import NUM_RECORDS, uneven
from tests.training.ranks import run_cases

pytestmark = pytest.mark.timeout(120)

LEFT = {number for number in range(NUM_RECORDS) if uneven(number) is not None}
SHORTEST_LANE, LONGEST_LANE = 5, 10
READ_BY_ONE = ("drop inline", "drop threads", "drop processes", "pad threads")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases("tests.contract.mesh_cases", tmp_path_factory.mktemp("mesh"))


def of(found: dict[str, Any], *keys: str) -> list[Any]:
    """Return a result of each of the four ranks."""
    ranks = found["four"]
    for key in keys:
        ranks = [rank[key] for rank in ranks]
    return list(ranks)


def labels(batches: list[Any]) -> list[int]:
    return sorted(itertools.chain.from_iterable(batch[6][0] for batch in batches if not batch[2]))


def apart(dp_rank: int, end: str) -> list[list[Any]]:
    """What a data-parallel rank of two delivers where each is alone, without fillers to keep up with the other."""
    with mesh_cases.make(mesh=Mesh(dp_rank=dp_rank, dp_size=2), end=end, preprocess=plain) as loader:
        found: list[list[Any]] = json.loads(json.dumps([[mesh_cases.entry_of(batch) for batch in loader] for _ in range(2)]))
        return found


def without_reader(batches: list[Any]) -> list[Any]:
    return [[*batch[:6], batch[6][:2]] for batch in batches]


@pytest.mark.parametrize("name", READ_BY_ONE)
def test_one_rank_reads_for_its_peers(name: str, found: Any) -> None:
    first, second, third, fourth = of(found, "read by one", name)
    assert first == second
    assert third == fourth
    num_steps = SHORTEST_LANE if name.startswith("drop") else LONGEST_LANE
    for ranks, reader in ((first, 0), (third, 2)):
        for batches in ranks["batches"]:
            assert len(batches) == 3 * num_steps
            assert all(set(batch[6][2]) == {reader} for batch in batches if not batch[2]), "the peer has preprocessed something"
    for one, other in zip(first["batches"], third["batches"], strict=True):
        assert not set(labels(one)) & set(labels(other))
        if name.startswith("pad"):
            assert sorted(labels(one) + labels(other)) == sorted(LEFT)


def test_what_peers_get_is_what_each_would_read(found: Any) -> None:
    for at, dp_rank in ((1, 0), (3, 1)):
        got = of(found, "read by one", "no filter")[at]["batches"]
        alone = apart(dp_rank, "drop")
        assert [without_reader(batches) for batches in got] == [without_reader(batches) for batches in alone]


def test_the_state_of_a_peer_resumes_a_reader_and_a_rank_that_reads_for_itself(found: Any) -> None:
    whole = of(found, "read by one", "drop threads")
    for rank in range(4):
        assert whole[rank]["states"] == whole[rank - rank % 2]["states"]
        for name in ("resumed", "resumed apart"):
            first, second = found["four"][rank]["read by one"][name]["batches"]
            assert without_reader(first) == without_reader(whole[rank]["batches"][0][4:])
            assert without_reader(second) == without_reader(whole[rank]["batches"][1])


def test_fields_of_any_size_travel(found: Any) -> None:
    for one in of(found, "read by one", "long text"):
        assert all(batch[4]["name"] == 40_000 for batch in one["batches"][0])
        assert all(batch[4]["empty"] == [0, 3] and batch[4]["scalar"] == [] for batch in one["batches"][0])


def test_async_for_gives_the_same(found: Any) -> None:
    assert [one["batches"][0] for one in of(found, "read by one", "async")] == [
        one["batches"][0] for one in of(found, "read by one", "drop threads")
    ]


def test_an_error_of_the_reader_comes_to_its_peers_in_its_place(found: Any) -> None:
    first, second, third, fourth = of(found, "read by one", "failing")
    assert first == second
    assert first["error"]["kind"] == "PreprocessError"
    assert "record 20 is bad" in first["error"]["text"]
    assert [len(one["batches"][0]) for one in (first, third)] == [5, 6]
    for other in (third, fourth):
        assert other["error"]["kind"] == "SynchronizationError"
        assert "the loader of rank 0 failed" in other["error"]["text"]


def test_loops_that_are_left_do_not_mix_with_later_ones(found: Any) -> None:
    for rank, loops in enumerate(of(found, "left early")):
        alone = apart(rank // 2, "drop")[0]
        assert [without_reader(loop) for loop in loops] == [without_reader(alone[:length]) for length in (3, 5, 30)]


def test_a_reader_that_leaves_its_loop_is_named(found: Any) -> None:
    for rank in (1, 3):
        error = found["four"][rank]["reader leaves"]["error"]
        assert error["kind"] == "SynchronizationError"
        assert error["missing"] == [rank - 1]
        assert f"rank {rank} waits for rank {rank - 1}" in error["text"]
        assert "the reader left its loop" in error["text"]


def test_a_reader_that_is_killed_is_noticed_by_all(found: Any) -> None:
    for rank, one in found["killed"].items():
        assert one["error"]["kind"] == "SynchronizationError", rank
        assert one["seconds"] < 30
    assert "2" in found["killed"]["3"]["error"]["text"]


def test_ranks_that_fit_are_let_through(found: Any) -> None:
    for name, num_passes in (("fits", 2), ("packed", 1), ("sampler that fits", 2)):
        first, second, third, fourth = of(found, "misfits", name)
        assert first == second
        assert third == fourth
        assert [first["error"], third["error"]] == [None, None]
        assert len(first["batches"]) == num_passes
        ids = [{tuple(sample) for batch in one["batches"][0] for sample in batch[5]} for one in (first, third)]
        assert ids[0]
        assert not {sample[0] for sample in ids[0]} & {sample[0] for sample in ids[1]}


def test_a_sampler_that_deals_by_the_coordinate_is_let_through(found: Any) -> None:
    first, second, third, fourth = of(found, "misfits", "split sampler that fits")
    assert [one["error"] for one in (first, second, third, fourth)] == [None] * 4
    assert first["batches"] == second["batches"] != third["batches"] == fourth["batches"]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("seed", ["start-up check", "same configuration on all 4 ranks", "rank 0, 1, 2 against rank 3", "seed: 0 on rank 0, 1 on rank 3"]),
        ("batch", ["start-up check", "rank 0, 2 against rank 1, 3", "batch.batch_size: 2 on rank 0, 3 on rank 1"]),
        (
            "resumed on some",
            ["start-up check", "begin at the same step", "epoch 0, step 1, from a loaded state, on rank 0 against"],
        ),
        ("same coordinate", ["start-up check", "dp_rank 1 on 0 and dp_rank 0 on 4", "not from the global rank"]),
        ("lanes", ["start-up check", "same num_lanes on all ranks", "num_lanes 12 on rank 0"]),
        ("by global rank", ["check of deliveries", "ranks of dp_rank 0 to get the same bytes"]),
        ("samples", ["check of deliveries", "ranks of dp_rank 1 to get the same micro-batches"]),
        ("sampler", ["start-up check", "same configuration on all 4 ranks", "order.starts: '[", "on rank 1"]),
        ("split sampler", ["start-up check", "share dp_rank 0, to read the same data", "order.starts: '[", "never by the global rank"]),
        ("own mesh", ["start-up check", "same dp_size on all ranks", "dp_size 2 on rank 0 against dp_size 4 on rank 1, 2, 3"]),
        ("unseeded", ["check of deliveries", "same record ids with different content", "read='group'"]),
    ],
)
def test_ranks_that_do_not_fit_all_say_so(name: str, texts: list[str], found: Any) -> None:
    for one in of(found, "misfits", name):
        assert one["error"]["kind"] == "SynchronizationError"
        for text in texts:
            assert text in one["error"]["text"]
        assert len(one["batches"][0]) <= 6, "found before the third step"


def test_nothing_is_checked_where_nobody_asks(found: Any) -> None:
    assert [one["error"] for one in of(found, "misfits", "unseeded, not checked")] == [None] * 4


def test_a_mesh_of_another_size_than_the_job_is_alone(found: Any) -> None:
    for one in of(found, "misfits", "alone"):
        assert one["error"] is None
        assert labels(one["batches"][0]) == list(range(NUM_RECORDS))


def test_one_cannot_read_for_others_without_a_process_group() -> None:
    loader: Loader = mesh_cases.make(mesh=Mesh(tp_rank=1, tp_size=2), read="group")
    with loader, pytest.raises(ValueError, match=r"Loader\(read='group'\): expected an initialised process group of the 2 ranks"):
        next(iter(loader))


def test_a_record_that_failed_on_one_rank_is_run_on_none_again(found: Any) -> None:
    """In later passes, where the shuffle deals it to another rank, and after a resume: each fails once in the whole job."""
    bad = [number for number in range(NUM_RECORDS) if number % 5 == 3]
    states, passes = zip(*found["quarantined"], strict=True)
    known = [{tuple(record) for lane in state["lanes"].values() for record in lane["quarantined"]} for state in states]
    assert known[0] == known[1]
    assert known[2] == known[3]
    assert len(known[0]) + len(known[2]) == len(bad)
    assert known[0]
    assert known[2]
    for at in range(5):
        rows = passes[0][at][0] + passes[2][at][0]
        assert not set(rows) & set(bad)
        assert len(rows) == len(set(rows)) > NUM_RECORDS / 2
        assert [failed[at][1] for failed in passes] == [bad] * 4, "one call for each, in the first pass"
    dealt = [passes[0][at][0] for at in range(3)]
    assert dealt[0] != dealt[1] != dealt[2], "the shuffle deals others to a rank"
