"""Contract 7, ranks stop together: with data that end unevenly, for every policy, on several numbers of ranks, and when one is missing."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest

from aioloader import FixedBatch, Loader, Mesh, UnevenEndError
from aioloader.state import merge
from tests.contract.cases import INLINE, THREADS, collate
from tests.contract.end_cases import entries, make
from tests.contract.uneven import NUM_LANES, NUM_RECORDS, uneven
from tests.training.ranks import run_cases

pytestmark = pytest.mark.timeout(120)

NUM_LEFT = sum(uneven(number) is not None for number in range(NUM_RECORDS))
SHORTEST, LONGEST = 5, 10
"""Steps of lane 1 and of lane 0."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases("tests.contract.end_cases", tmp_path_factory.mktemp("end"))


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Any]]:
    """What one rank delivers that serves all lanes."""
    passes = {}
    for end in ("drop", "pad"):
        with make(Mesh(), end=end) as loader:
            passes[end] = as_json(entries(loader))
    return passes


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def of_ranks(ranks: list[list[Any]]) -> list[Any]:
    """Return the micro-batches of all ranks by step and lane, of the first step on that is there."""
    return sorted(itertools.chain.from_iterable(ranks), key=lambda entry: entry[:2])


HOSTS = {"drop": ("inline", "threads", "processes"), "pad": ("inline", "threads")}
CASES = [("two", "drop", f"drop {host}") for host in HOSTS["drop"]] + [("two", "pad", f"pad {host}") for host in HOSTS["pad"]]
CASES += [("three", "drop", "drop"), ("three", "pad", "pad")]


@pytest.mark.parametrize(("size", "end", "name"), CASES, ids=[f"{size}-{name}" for size, _, name in CASES])
def test_all_ranks_deliver_as_many_and_what_one_rank_would(size: str, end: str, name: str, found: Any, alone: Any) -> None:
    ranks = [rank["whole"][name] for rank in found[size]]
    num_steps = SHORTEST if end == "drop" else LONGEST
    assert [rank["error"] for rank in ranks] == [None] * len(ranks)
    assert {len(one) for rank in ranks for one in rank["passes"]} == {num_steps * NUM_LANES // len(ranks)}
    assert of_ranks([rank["passes"][0] for rank in ranks]) == alone[end]
    for number in range(2):
        assert {step for rank in ranks for step in rank["steps"][number]} == {num_steps * (number + 1)}
    again = of_ranks([rank["passes"][1] for rank in ranks])
    assert [[step - num_steps, *rest] for step, *rest in again] == alone[end], "the next pass begins where the state says"


@pytest.mark.parametrize("name", ["drop threads", "drop processes", "pad threads"])
def test_every_record_is_accounted_for(name: str, found: Any) -> None:
    for number in range(2):
        counts = [rank["whole"][name]["counts"][number] for rank in found["two"]]
        total = {key: sum(count[key] for count in counts) for key in counts[0]}
        settled = ("delivered_samples", "dropped_samples", "dropped_records", "filtered_records")
        assert sum(total[key] for key in settled) == NUM_RECORDS * (number + 1)
        assert (total["delivered_samples"] == NUM_LEFT * (number + 1)) == name.startswith("pad")


def test_streams_of_unknown_length_end_together_too(found: Any, alone: Any) -> None:
    for end in ("drop", "pad"):
        ranks = [rank["stream"][end]["passes"][0] for rank in found["two"]]
        values = [[*entry[:2], entry[2:]] for entry in of_ranks(ranks)]
        assert values == [[*entry[:2], entry[2:]] for entry in alone[end]]


@pytest.mark.parametrize(("size", "name"), [("two", "error inline"), ("two", "error threads"), ("three", "error")])
def test_uneven_ends_are_an_error_on_all_ranks_alike(size: str, name: str, found: Any) -> None:
    ranks = [rank["whole"][name] for rank in found[size]]
    assert len({rank["error"] for rank in ranks}) == 1
    assert ranks[0]["error"].startswith(
        "UnevenEndError: end of data: expected all lanes to have equally many micro-batches, got one that ends"
    )
    assert f"before step {SHORTEST} and one that goes on to step" in ranks[0]["error"]
    assert {len(rank["passes"][0]) for rank in ranks} == {SHORTEST * NUM_LANES // len(ranks)}, "all that all have is delivered"


def test_where_records_are_samples_nothing_has_to_be_agreed_on(found: Any) -> None:
    for end, passes in itertools.chain.from_iterable(rank["one to one"].items() for rank in found["two"]):
        assert passes["error"] is None, end
        assert [len(one) for one in passes["passes"]] == [LONGEST * NUM_LANES // 2] * 2
    assert [rank["not one to one"]["error"] for rank in found["two"]] == [rank["whole"]["error threads"]["error"] for rank in found["two"]]


@pytest.mark.parametrize("end", ["drop", "pad"])
def test_a_resumed_pass_comes_to_the_same_end(end: str, found: Any, alone: Any) -> None:
    num_steps = SHORTEST if end == "drop" else LONGEST
    for at, state in enumerate(found["states"][end]):
        ranks = [rank["resumed"][end][at] for rank in found["two"]]
        rest = of_ranks([rank["rest"] for rank in ranks])
        left = [entry for entry in alone[end] if entry[0] >= state["lanes"][str(entry[1])]["step"]]
        if left:
            assert rest == left
        else:
            assert [[step - num_steps, *others] for step, *others in rest] == alone[end], "no pass is empty"
        after = {(lane["step"], lane["epoch"]) for rank in ranks for lane in rank["after"]["lanes"].values()}
        assert after == {(num_steps, 1) if left else (2 * num_steps, 2)}


@pytest.mark.parametrize("end", ["drop", "pad"])
def test_another_number_of_ranks_comes_to_the_same_end(end: str, found: Any, alone: Any) -> None:
    for at, state in enumerate(found["states"][end]):
        three = of_ranks([rank["resumed"][end][at] for rank in found["three"]])
        two = of_ranks([rank["resumed"][end][at]["rest"] for rank in found["two"]])
        assert three == two
        with make(Mesh(), end=end) as loader:
            loader.load_state_dict(state)
            assert as_json(entries(loader)) == two


def test_passes_that_are_left_and_loaders_side_by_side_do_not_mix(found: Any, alone: Any) -> None:
    for rank in found["two"]:
        first, again, beside, other, last = rank["left early"]
        assert first == again == beside[:5]
        assert beside == [entry for entry in alone["drop"] if entry[1] in {one[1] for one in beside}]
        assert other == [entry for entry in alone["pad"] if entry[1] in {one[1] for one in other}][: len(other)]
        assert len(last) == len(beside)


def test_an_async_consumer_waits_for_slow_ranks_with_its_loop_free(found: Any) -> None:
    fast, slow = (rank["async"] for rank in found["two"])
    assert len(fast["batches"]) == len(slow["batches"]) == SHORTEST * 3
    assert fast["waits"]["ranks"]["wait_s"] > 0.1, "it did wait"
    assert fast["longest_s"] < 0.08


def test_a_rank_whose_data_are_slow_holds_nobody_up_for_ever(found: Any) -> None:
    assert len({len(one) for rank in found["two"] for one in rank["slow"]["passes"]}) == 1


@pytest.mark.parametrize("size", ["two", "three"])
def test_a_rank_that_fails_is_named_on_the_others_at_once(size: str, found: Any) -> None:
    ranks = [rank["failing"] for rank in found[size]]
    failed = 2 % len(ranks)
    for number, rank in enumerate(ranks):
        if number == failed:
            assert rank["kind"] == "PreprocessError"
        else:
            assert rank["kind"] == "SynchronizationError"
            assert rank["missing"] == [failed]
            assert rank["waited_s"] < 1.5


@pytest.mark.parametrize(("name", "missing", "timeout_s"), [("absent", 1, 2.0), ("never there", 2, 0.5)])
def test_a_rank_that_stays_away_is_named_at_the_deadline(name: str, missing: int, timeout_s: float, found: Any) -> None:
    others = [rank[name] for number, rank in enumerate(found["three"]) if number != missing]
    for rank in others:
        assert rank["kind"] == "SynchronizationError"
        assert rank["missing"] == [missing]
        assert f"got no sign of rank {missing} within {timeout_s:g} s" in rank["text"]
        assert timeout_s <= rank["waited_s"] + 0.1 < timeout_s + 2


def test_a_rank_that_is_killed_is_named_within_the_deadline(found: Any) -> None:
    for rank in found["killed"]:
        assert rank["kind"] == "SynchronizationError"
        assert rank["missing"] == [2]
        assert rank["waited_s"] < 3.5
        assert rank["num_batches"] >= 4


def test_the_trainer_gives_fillers_no_weight_and_stops_on_all_ranks(found: Any) -> None:
    for end, num_steps in (("drop", SHORTEST), ("pad", LONGEST)):
        one, other = (rank["trained"][end] for rank in found["two"])
        assert one == other
        assert one["stopped_by"] == "data"
        assert len(one["losses"]) == num_steps
        assert one["targets"] == [expected_targets(step) for step in range(num_steps)]
        assert all(map(math.isfinite, one["losses"]))


def expected_targets(step: int) -> int:
    """Return 4 targets for each sample of a step."""
    lanes = [[number for number in range(lane, NUM_RECORDS, NUM_LANES) if uneven(number) is not None] for lane in range(NUM_LANES)]
    return sum(4 * len(lane[2 * step : 2 * step + 2]) for lane in lanes)


# Alone, without a process group


@pytest.mark.parametrize("options", [INLINE, THREADS], ids=["inline", "threads"])
def test_lanes_of_one_rank_are_padded(options: Any, alone: Any) -> None:
    with make(Mesh(), end="pad", **options) as loader:
        batches = list(loader)
    assert as_json(entries(batches)) == alone["pad"]
    fillers = [batch for batch in batches if batch.is_filler]
    assert {batch.lane for batch in fillers} == {1, 4}
    assert len(fillers) == LONGEST - SHORTEST + 3
    for batch in fillers:
        assert batch["labels"].tolist() == [-100, -100]
        assert (batch["x"].shape, batch["x"].dtype, batch["name"]) == (batches[0]["x"].shape, batches[0]["x"].dtype, None)
        assert (batch.samples, batch.num_tokens, batch.num_targets, batch.num_padding) == ([], 0, 0, 0)
        assert batch.to("cpu").is_filler


def test_every_state_of_a_padded_pass_is_resumed_exactly(alone: Any) -> None:
    """Between real micro-batches, between fillers, and in the middle of a step."""
    with make(Mesh(), end="pad") as loader:
        states = [batch.state() for batch in loader]
    for at, state in enumerate(states[:-1]):
        with make(Mesh(), end="pad") as loader:
            loader.load_state_dict(as_json(state))
            assert as_json(entries(loader)) == alone["pad"][at + 1 :], at


def test_lanes_of_one_rank_that_have_to_end_together_and_do_not() -> None:
    with make(Mesh(), end="error") as loader, pytest.raises(UnevenEndError, match=rf"before step {SHORTEST} .* step {LONGEST}"):
        list(loader)


@pytest.mark.parametrize(("num_records", "num_steps"), [(24, 2), (25, 3), (5, 1), (1, 1)])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_an_epoch_is_filled_up_with_records_from_its_beginning(num_records: int, num_steps: int, dp_size: int) -> None:
    delivered: list[tuple[int, int]] = []
    repeated, states = 0, []
    for dp_rank in range(dp_size):
        mesh = Mesh(dp_rank=dp_rank, dp_size=dp_size)
        with Loader(range(num_records), batch=FixedBatch(3), collate=collate, lanes=4, end="repeat", mesh=mesh, **INLINE) as loader:
            assert len(loader) == num_steps * 4 // dp_size
            batches = list(loader)
            assert len(batches) == len(loader)
            repeated += loader.stats()["records"]["repeated_records"]
            states.append(batches[(len(batches) - 1) // 2].state())
            for batch in batches:
                positions = [sample.seq * 4 + batch.lane for sample in batch.samples]
                delivered += zip(positions, batch["x"].tolist(), strict=True)
    assert [number for _, number in sorted(delivered)] == [position % num_records for position in range(num_steps * 12)]
    assert repeated == num_steps * 12 - num_records
    if num_steps > 1:
        with Loader(range(num_records), batch=FixedBatch(3), collate=collate, lanes=4, end="repeat", mesh=Mesh(), **THREADS) as loader:
            loader.load_state_dict(merge(states))
            rest = [sample.seq * 4 + batch.lane for batch in loader for sample in batch.samples]
            assert loader.stats()["records"]["repeated_records"] == repeated
        assert set(rest) < set(range(num_steps * 12))


@pytest.mark.parametrize(
    ("end", "num_records", "epochs", "expected"),
    [
        ("drop", 25, 1, 4),
        ("drop", 23, 1, 4),
        ("drop", 3, 1, 0),
        ("pad", 25, 1, 8),
        ("pad", 20, 1, 4),
        ("pad", 25, 2, 16),
        ("repeat", 25, 1, 8),
        ("error", 24, 3, 24),
    ],
)
def test_the_length_is_what_a_pass_delivers(end: str, num_records: int, epochs: int, expected: int) -> None:
    with Loader(range(num_records), batch=FixedBatch(5), collate=collate, lanes=4, end=end, epochs=epochs, mesh=Mesh(), **INLINE) as loader:
        assert len(loader) == len(loader.as_iterable_dataset()) == expected
        assert len(list(loader)) == expected
        assert loader


@pytest.mark.parametrize(
    "options",
    [
        {"preprocess": uneven},
        {"source": iter(range(9)), "host": "thread"},
        {"epochs": None},
        {"source": range(9), "end": "error", "lanes": 2},
    ],
    ids=["preprocess", "stream", "endless", "uneven"],
)
def test_a_length_that_is_not_certain_is_a_type_error(options: Any) -> None:
    options = {"source": range(9), "batch": FixedBatch(1), "collate": collate, "workers": 0, "mesh": Mesh(), **options}
    with Loader(**options) as loader, pytest.raises(TypeError, match="depends on the data"):
        len(loader)
